/* headwater._kernels._expected: the expected keys of headwater._kernels.expected, whose contract this keeps.
 *
 * Entries lie in one array; those in use are a doubly linked list from the oldest to the youngest, free ones a singly
 * linked one. Buckets of entries with the same hash are chains as well. To double the array is cheap (the kernel moves
 * its pages), and to fill buckets anew reads it from one end to the other: a few milliseconds for a million keys, and
 * only when there are more than there ever were. What is taken out leaves nothing to be cleared away later.
 *
 * Keys are digests of what clients send, who might look for some that share a bucket: the hash has a seed, Python's own.
 *
 * No Python runs while entries are changed: keys are copied before, and the answer is made of copies after.
 * Plain CPython limited API of 3.11; the module keeps nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KEY 16
#define NONE UINT32_MAX
#define LEAST_BITS 8
#define MOST_BITS 28 /* of entries */

typedef struct {
    uint64_t a, b;
} name_t;

typedef struct {
    name_t name;
    uint32_t count;          /* by how many it is expected */
    uint32_t older, younger; /* of one that is free, `younger` is the next that is */
    uint32_t next;           /* in its bucket */
} entry_t;

typedef struct {
    PyObject_HEAD
    entry_t *entries;
    uint32_t *buckets; /* as many as there is room for entries */
    uint64_t seed;
    uint32_t bits, used; /* 1 << bits entries, 0 for none; how many of them were ever in use */
    uint32_t count, oldest, youngest, free;
} expected_t;

/* ---- entries --------------------------------------------------------------------------------------------------- */

static inline uint32_t *bucket(const expected_t *self, const name_t *name) {
    return &self->buckets[((name->a ^ name->b) * self->seed) >> (64 - self->bits)];
}

static inline uint32_t find(const expected_t *self, const name_t *name) {
    uint32_t at = *bucket(self, name);
    while (at != NONE && (self->entries[at].name.a != name->a || self->entries[at].name.b != name->b))
        at = self->entries[at].next;
    return at;
}

/* Have what `find` will look at come into the processor's caches: all at once, where one after another costs waiting.
 * Only where there are buckets. */
__attribute__((always_inline)) static inline void prefetch(const expected_t *self, const name_t *names, size_t count) {
    for (size_t i = 0; i < count; i++)
        __builtin_prefetch(bucket(self, &names[i]));
    for (size_t i = 0; i < count; i++) {
        uint32_t at = *bucket(self, &names[i]);
        if (at != NONE)
            __builtin_prefetch(&self->entries[at]);
    }
}

/* Into its place among all, as the youngest. */
static inline void append(expected_t *self, uint32_t at) {
    self->entries[at].older = self->youngest;
    self->entries[at].younger = NONE;
    if (self->youngest == NONE)
        self->oldest = at;
    else
        self->entries[self->youngest].younger = at;
    self->youngest = at;
}

static inline void unlink_one(expected_t *self, uint32_t at) {
    entry_t *it = &self->entries[at];
    if (it->older == NONE)
        self->oldest = it->younger;
    else
        self->entries[it->older].younger = it->younger;
    if (it->younger == NONE)
        self->youngest = it->older;
    else
        self->entries[it->younger].older = it->older;
}

static void drop(expected_t *self, uint32_t at) {
    entry_t *it = &self->entries[at];
    uint32_t *link = bucket(self, &it->name);
    while (*link != at)
        link = &self->entries[*link].next;
    *link = it->next;
    unlink_one(self, at);
    it->younger = self->free;
    self->free = at;
    self->count--;
}

static void add(expected_t *self, const name_t *name) {
    uint32_t at = self->free;
    if (at == NONE)
        at = self->used++;
    else
        self->free = self->entries[at].younger;
    uint32_t *link = bucket(self, name);
    self->entries[at] = (entry_t){.name = *name, .count = 1, .next = *link};
    *link = at;
    append(self, at);
    self->count++;
}

/* Room for so many more; false with an exception set. */
static bool reserve(expected_t *self, size_t more) {
    uint32_t bits = self->bits ? self->bits : LEAST_BITS;
    while (self->count + more > (size_t)1 << bits)
        if (++bits > MOST_BITS)
            return PyErr_NoMemory() != NULL;
    if (bits == self->bits)
        return true;
    uint32_t *buckets = PyMem_Malloc((sizeof *buckets) << bits);
    entry_t *entries = buckets ? PyMem_Realloc(self->entries, (sizeof *entries) << bits) : NULL;
    if (!entries) {
        PyMem_Free(buckets);
        return PyErr_NoMemory() != NULL;
    }
    PyMem_Free(self->buckets);
    self->entries = entries, self->buckets = buckets, self->bits = bits;
    memset(buckets, 0xFF, (sizeof *buckets) << bits);
    for (uint32_t at = self->oldest; at != NONE; at = entries[at].younger) {
        uint32_t *link = bucket(self, &entries[at].name);
        entries[at].next = *link;
        *link = at;
    }
    return true;
}

static void forget(expected_t *self) {
    PyMem_Free(self->entries);
    PyMem_Free(self->buckets);
    self->entries = NULL, self->buckets = NULL;
    self->bits = self->used = self->count = 0;
    self->oldest = self->youngest = self->free = NONE;
}

/* ---- Python ---------------------------------------------------------------------------------------------------- */

/* The keys of a list or tuple, to be freed; NULL with an exception set. */
static name_t *read_names(PyObject *given, size_t *count) {
    PyObject *keys = PyList_Check(given) || PyTuple_Check(given) ? Py_NewRef(given) : PySequence_List(given);
    if (!keys)
        return NULL;
    bool is_list = PyList_Check(keys);
    Py_ssize_t size = is_list ? PyList_Size(keys) : PyTuple_Size(keys);
    name_t *names = PyMem_Malloc(size ? (size_t)size * sizeof *names : 1);
    if (!names)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; names && i < size; i++) {
        PyObject *key = is_list ? PyList_GetItem(keys, i) : PyTuple_GetItem(keys, i);
        char *bytes;
        Py_ssize_t length;
        bool is_good = key && PyBytes_AsStringAndSize(key, &bytes, &length) >= 0;
        if (is_good && length != KEY) {
            PyErr_Format(PyExc_ValueError, "a key has %d bytes here, not %zd", KEY, length);
            is_good = false;
        }
        if (is_good) {
            memcpy(&names[i], bytes, KEY);
        } else {
            PyMem_Free(names);
            names = NULL;
        }
    }
    Py_DECREF(keys);
    *count = (size_t)size;
    return names;
}

static PyObject *list_of(const name_t *names, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *key = PyBytes_FromStringAndSize((const char *)&names[i], KEY);
        if (!key || PyList_SetItem(list, (Py_ssize_t)i, key) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *expect(expected_t *self, PyObject *args) {
    PyObject *given;
    Py_ssize_t held, most;
    if (!PyArg_ParseTuple(args, "Onn:expect", &given, &held, &most))
        return NULL;
    size_t count, surplus = 0;
    name_t *names = read_names(given, &count);
    if (!names || !reserve(self, count)) {
        PyMem_Free(names);
        return NULL;
    }
    prefetch(self, names, count);
    for (size_t i = count; i-- > 0;) {
        uint32_t known = find(self, &names[i]);
        if (known != NONE) {
            self->entries[known].count += self->entries[known].count < UINT32_MAX;
            unlink_one(self, known);
            append(self, known);
        } else if ((Py_ssize_t)i >= held) {
            add(self, &names[i]);
        }
    }
    if ((Py_ssize_t)self->count > most)
        surplus = self->count - (size_t)(most > 0 ? most : 0);
    if (surplus > count) {
        name_t *more = PyMem_Realloc(names, surplus * sizeof *names);
        if (!more) {
            PyMem_Free(names);
            return PyErr_NoMemory();
        }
        names = more;
    }
    uint32_t at = self->oldest;
    for (size_t i = 0; i < surplus; i++, at = self->entries[at].younger)
        names[i] = self->entries[at].name;
    prefetch(self, names, surplus);
    for (size_t i = 0; i < surplus; i++)
        drop(self, self->oldest);
    PyObject *gone = list_of(names, surplus);
    PyMem_Free(names);
    return gone;
}

static PyObject *unexpect(expected_t *self, PyObject *given) {
    size_t count, lost = 0;
    name_t *names = read_names(given, &count);
    if (!names)
        return NULL;
    for (size_t i = 0; self->count && i < count; i++) {
        uint32_t at = find(self, &names[i]);
        if (at == NONE || --self->entries[at].count)
            continue;
        names[lost++] = names[i];
        drop(self, at);
    }
    PyObject *gone = list_of(names, lost);
    PyMem_Free(names);
    return gone;
}

static PyObject *discard(expected_t *self, PyObject *given) {
    size_t count;
    name_t *names = read_names(given, &count);
    if (!names)
        return NULL;
    for (size_t i = 0; self->count && i < count; i++) {
        uint32_t at = find(self, &names[i]);
        if (at != NONE)
            drop(self, at);
    }
    PyMem_Free(names);
    return Py_NewRef(Py_None);
}

static PyObject *clear(expected_t *self, PyObject *nothing) {
    (void)nothing;
    forget(self);
    return Py_NewRef(Py_None);
}

static Py_ssize_t length(expected_t *self) {
    return self->count;
}

static PyObject *expected_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Expected", names))
        return NULL;
    PyObject *word = PyBytes_FromString("expected");
    Py_hash_t seed = word ? PyObject_Hash(word) : -1;
    Py_XDECREF(word);
    if (PyErr_Occurred())
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    expected_t *self = (expected_t *)alloc(type, 0);
    if (self) {
        self->seed = (uint64_t)seed | 1;
        forget(self);
    }
    return (PyObject *)self;
}

static void expected_free(expected_t *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    forget(self);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"expect", (PyCFunction)expect, METH_VARARGS, NULL},
    {"unexpect", (PyCFunction)unexpect, METH_O, NULL},
    {"discard", (PyCFunction)discard, METH_O, NULL},
    {"clear", (PyCFunction)clear, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot EXPECTED[] = {
    {Py_tp_doc, "The expected keys of headwater._kernels.expected."},
    {Py_tp_new, expected_new},
    {Py_tp_dealloc, expected_free},
    {Py_tp_methods, METHODS},
    {Py_mp_length, length},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "headwater._kernels._expected.Expected",
    .basicsize = sizeof(expected_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = EXPECTED,
};

static int load(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &SPEC, NULL);
    int failed = type ? PyModule_AddObjectRef(module, "Expected", type) : -1;
    Py_XDECREF(type);
    return failed;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, load},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._expected",
    .m_doc = "Expected keys; the contract is in headwater._kernels.expected.",
    .m_size = 0,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__expected(void) {
    return PyModuleDef_Init(&MODULE);
}
