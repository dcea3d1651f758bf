/* headwater._kernels._index: the table of core.keytable with open addressing.
 *
 * A key's first bits name its shard; every shard grows, shrinks and forgets by itself, so no pause is longer than
 * a shard is large.  Within a shard: linear probing, at most 3/4 full, no tombstones (what follows a deleted slot moves
 * back).  Before a batch is looked up its slots are prefetched: what a lookup costs is waiting for memory.
 *
 * Calls of Python (`step[old]`) happen while a table is being changed, so a table refuses to be entered again.  Making
 * objects that the garbage collector knows may run any finalizer, and let other threads in: so `enter` is asked after
 * they are made, and no slot is kept while a run is added.
 *
 * Plain CPython limited API of 3.11; the module keeps nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a key's first bits are its lowest here"
#endif

#define WINDOW 64        /* keys that are prefetched together when a lookup may end early */
#define STRIDE 16        /* how far apart keys are that a jump looks at */
#define SHARDS_MAX 1024
#define LEAST_SLOTS 16
#define MEMOS 64         /* steps that are remembered within one call */

typedef struct {
    uint64_t a, b;
    uint32_t value, stamp; /* value 0: the slot is free */
} slot_t;

typedef struct {
    slot_t *slots;
    uint32_t capacity, count;
} shard_t;

typedef struct {
    PyObject_HEAD
    shard_t *shards;
    uint32_t shard_count, shard_limit, key_bytes, tick;
    uint64_t stamped;
    bool busy;
} table_t;

typedef struct {
    uint64_t a, b;
} wanted_t;

typedef struct {
    uint32_t old, new;
    Py_ssize_t times;
    bool known;
} memo_t;

typedef struct {
    PyObject *step, *moved;
    memo_t memos[MEMOS];
} steps_t;

/* ---- one shard ------------------------------------------------------------------------------------------ */

static inline uint32_t home(const shard_t *shard, uint64_t a, uint64_t b) {
    uint64_t h = a ^ (b * UINT64_C(0x9E3779B97F4A7C15));
    h ^= h >> 32;
    h *= UINT64_C(0xD6E8FEB86659FD93);
    return (uint32_t)(((h >> 32) * shard->capacity) >> 32);
}

static inline uint32_t after(const shard_t *shard, uint32_t at) { return at + 1 == shard->capacity ? 0 : at + 1; }

/* Where a key is, or the free slot where it would go; a shard that has slots always has a free one. */
static inline slot_t *look(const shard_t *shard, uint64_t a, uint64_t b) {
    uint32_t at = home(shard, a, b);
    for (;; at = after(shard, at)) {
        slot_t *slot = &shard->slots[at];
        if (!slot->value || (slot->a == a && slot->b == b))
            return slot;
    }
}

static uint32_t roomy(uint32_t count) { /* half full */
    return count < LEAST_SLOTS / 2 ? LEAST_SLOTS : 2 * count;
}

/* Puts what has a value into `slots`, which are all free. */
static void refill(shard_t *shard, slot_t *slots, uint32_t capacity) {
    shard_t fresh = {slots, capacity, 0};
    for (uint32_t at = 0; at < shard->capacity; at++)
        if (shard->slots[at].value) {
            *look(&fresh, shard->slots[at].a, shard->slots[at].b) = shard->slots[at];
            fresh.count++;
        }
    PyMem_Free(shard->slots);
    *shard = fresh;
}

static slot_t *new_slots(uint32_t capacity) {
    slot_t *slots = PyMem_Calloc(capacity, sizeof *slots);
    if (!slots)
        PyErr_NoMemory();
    return slots;
}

static void drop(shard_t *shard, slot_t *slot) {
    uint32_t hole = (uint32_t)(slot - shard->slots);
    for (uint32_t at = after(shard, hole); shard->slots[at].value; at = after(shard, at)) {
        uint32_t wants = home(shard, shard->slots[at].a, shard->slots[at].b);
        bool stays = hole < at ? wants > hole && wants <= at : wants > hole || wants <= at;
        if (!stays) {
            shard->slots[hole] = shard->slots[at];
            hole = at;
        }
    }
    shard->slots[hole].value = 0;
    shard->count--;
}

/* The `rank`-th largest, counted from 0 (Hoare's selection). */
static uint32_t largest(uint32_t *ages, uint32_t count, uint32_t rank) {
    int64_t low = 0, high = (int64_t)count - 1, want = rank;
    while (low < high) {
        uint32_t middle = ages[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (ages[i] > middle)
                i++;
            while (ages[j] < middle)
                j--;
            if (i <= j) {
                uint32_t age = ages[i];
                ages[i++] = ages[j];
                ages[j--] = age;
            }
        }
        if (want <= j)
            high = j;
        else if (want >= i)
            low = i;
        else
            break;
    }
    return ages[want];
}

static bool tell(PyObject *counts, uint32_t value, Py_ssize_t times) {
    PyObject *key = PyLong_FromUnsignedLong(value), *sum = NULL;
    bool done = false;
    if (!key)
        return false;
    PyObject *before = PyDict_GetItemWithError(counts, key);
    if (!PyErr_Occurred() && (sum = PyLong_FromSsize_t(times + (before ? PyLong_AsSsize_t(before) : 0))))
        done = !PyDict_SetItem(counts, key, sum);
    Py_DECREF(key);
    Py_XDECREF(sum);
    return done;
}

/* Forget the eighth that was met least recently, and what is as old as the youngest of it. */
static bool forget(table_t *table, shard_t *shard, PyObject *forgotten) {
    uint32_t count = 0, many = table->shard_limit / 8 ? table->shard_limit / 8 : 1;
    uint32_t *ages = PyMem_Malloc((size_t)shard->count * sizeof *ages);
    slot_t *slots = new_slots(shard->capacity);
    bool done = ages && slots;
    if (!ages && slots)
        PyErr_NoMemory();
    if (done) {
        for (uint32_t at = 0; at < shard->capacity; at++)
            if (shard->slots[at].value)
                ages[count++] = table->tick - shard->slots[at].stamp;
        uint32_t least = largest(ages, count, many - 1);
        for (uint32_t at = 0; at < shard->capacity; at++) {
            slot_t *slot = &shard->slots[at];
            if (slot->value && table->tick - slot->stamp >= least) {
                done = done && tell(forgotten, slot->value, 1);
                slot->value = 0;
            }
        }
        refill(shard, slots, shard->capacity);
        slots = NULL;
    }
    PyMem_Free(ages);
    PyMem_Free(slots);
    return done;
}

/* Room for one more. */
static bool reserve(table_t *table, shard_t *shard, PyObject *forgotten) {
    if (shard->count >= table->shard_limit && !forget(table, shard, forgotten))
        return false;
    if ((uint64_t)(shard->count + 1) * 4 <= (uint64_t)shard->capacity * 3)
        return true;
    uint32_t capacity = shard->capacity ? shard->capacity + shard->capacity / 2 : LEAST_SLOTS;
    slot_t *slots = new_slots(capacity);
    if (slots)
        refill(shard, slots, capacity);
    return slots != NULL;
}

/* ---- keys and steps ------------------------------------------------------------------------------------- */

static inline PyObject *item(PyObject *keys, Py_ssize_t index) { /* borrowed */
    return PyList_Check(keys) ? PyList_GetItem(keys, index) : PyTuple_GetItem(keys, index);
}

static PyObject *listed(PyObject *keys) {
    if (PyList_Check(keys) || PyTuple_Check(keys)) {
        Py_INCREF(keys);
        return keys;
    }
    return PySequence_List(keys);
}

/* Not PySequence_Size, for which a subclass may say what it likes. */
static inline Py_ssize_t size_of(PyObject *keys) {
    return PyList_Check(keys) ? PyList_Size(keys) : PyTuple_Size(keys);
}

static bool read_keys(const table_t *table, PyObject *keys, Py_ssize_t first, Py_ssize_t count, wanted_t *wanted) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = item(keys, first + i);
        char *bytes;
        Py_ssize_t length;
        if (!key || PyBytes_AsStringAndSize(key, &bytes, &length) < 0)
            return false;
        if (length != (Py_ssize_t)table->key_bytes) {
            PyErr_Format(PyExc_ValueError, "a key has %u bytes here, not %zd", table->key_bytes, length);
            return false;
        }
        wanted[i].b = 0;
        memcpy(&wanted[i], bytes, (size_t)length);
    }
    return true;
}

static inline shard_t *shard_of(const table_t *table, const wanted_t *key) {
    return &table->shards[key->a & (table->shard_count - 1)];
}

/* Inlined by order: gcc takes a function that only prefetches for one without effect, and leaves its calls out. */
__attribute__((always_inline)) static inline void prefetch(const table_t *table, const wanted_t *wanted, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        const shard_t *shard = shard_of(table, &wanted[i]);
        if (shard->capacity) { /* and the next line: a search that goes on must not wait again */
            const char *slot = (const char *)&shard->slots[home(shard, wanted[i].a, wanted[i].b)];
            __builtin_prefetch(slot);
            __builtin_prefetch(slot + 64);
        }
    }
}

static bool flush(steps_t *steps, memo_t *memo) {
    if (memo->known && memo->times && !tell(steps->moved, memo->old, memo->times))
        return false;
    memo->times = 0;
    return true;
}

/* What becomes of a value; NULL with an exception set. Asks Python once for each value, mostly. */
static memo_t *take(steps_t *steps, uint32_t old) {
    memo_t *memo = &steps->memos[old % MEMOS];
    if (memo->known && memo->old == old)
        return memo;
    if (!flush(steps, memo))
        return NULL;
    PyObject *key = PyLong_FromUnsignedLong(old);
    PyObject *new = key ? PyObject_GetItem(steps->step, key) : NULL;
    Py_XDECREF(key);
    if (!new)
        return NULL;
    unsigned long value = PyLong_AsUnsignedLong(new);
    Py_DECREF(new);
    if (PyErr_Occurred())
        return NULL;
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a value has 32 bits");
        return NULL;
    }
    *memo = (memo_t){old, (uint32_t)value, 0, true};
    return memo;
}

static bool flush_all(steps_t *steps) {
    bool done = true;
    for (int i = 0; i < MEMOS; i++)
        done = flush(steps, &steps->memos[i]) && done;
    return done;
}

static inline void stamp(table_t *table, slot_t *slot) {
    if (slot->stamp != table->tick) {
        slot->stamp = table->tick;
        table->stamped++;
    }
}

static bool change_one(table_t *table, const wanted_t *key, steps_t *steps, PyObject *forgotten) {
    shard_t *shard = shard_of(table, key);
    slot_t *slot = shard->capacity ? look(shard, key->a, key->b) : NULL;
    uint32_t old = slot ? slot->value : 0;
    memo_t *memo = take(steps, old);
    if (!memo)
        return false;
    memo->times++;
    if (!memo->new) {
        if (old)
            drop(shard, slot);
        return true;
    }
    if (!old) {
        uint32_t new = memo->new;
        if (!reserve(table, shard, forgotten))
            return false;
        slot = look(shard, key->a, key->b);
        *slot = (slot_t){key->a, key->b, new, table->tick};
        shard->count++;
        table->stamped++;
        return true;
    }
    slot->value = memo->new;
    stamp(table, slot);
    return true;
}

/* ---- methods -------------------------------------------------------------------------------------------- */

static bool enter(table_t *table) {
    if (table->busy)
        PyErr_SetString(PyExc_RuntimeError, "the table is being changed");
    return !table->busy;
}

static PyObject *table_change(table_t *table, PyObject *args) {
    PyObject *given, *step;
    unsigned int tick;
    if (!PyArg_ParseTuple(args, "OOI:change", &given, &step, &tick))
        return NULL;
    PyObject *keys = listed(given), *answer = NULL;
    if (!keys)
        return NULL;
    wanted_t few[4 * WINDOW], *wanted = few;
    steps_t steps = {.step = step, .moved = PyDict_New()};
    PyObject *forgotten = PyDict_New();
    Py_ssize_t count = size_of(keys);
    if (count > 4 * WINDOW && !(wanted = PyMem_Malloc((size_t)count * sizeof *wanted)))
        PyErr_NoMemory();
    if (wanted && steps.moved && forgotten && read_keys(table, keys, 0, count, wanted) && enter(table)) {
        bool done = true;
        table->busy = true;
        table->tick = tick;
        for (Py_ssize_t first = 0; done && first < count; first += 4 * WINDOW) {
            Py_ssize_t here = count - first < 4 * WINDOW ? count - first : 4 * WINDOW;
            prefetch(table, wanted + first, here);
            for (Py_ssize_t i = 0; done && i < here; i++)
                done = change_one(table, &wanted[first + i], &steps, forgotten);
        }
        table->busy = false;
        if (done && flush_all(&steps))
            answer = PyTuple_Pack(2, steps.moved, forgotten);
    }
    if (wanted != few)
        PyMem_Free(wanted);
    Py_DECREF(keys);
    Py_XDECREF(steps.moved);
    Py_XDECREF(forgotten);
    return answer;
}

static bool add_run(PyObject *runs, uint32_t value, Py_ssize_t end) {
    PyObject *run = Py_BuildValue("(In)", (unsigned int)value, end);
    bool done = run && !PyList_Append(runs, run);
    Py_XDECREF(run);
    return done;
}

/* Every key up to the first that is absent, each met. */
static bool walk(table_t *table, PyObject *keys, Py_ssize_t count, PyObject *runs) {
    wanted_t wanted[WINDOW];
    uint32_t last = 0;
    Py_ssize_t end = 0;
    for (Py_ssize_t first = 0; first < count; first += WINDOW) {
        Py_ssize_t here = count - first < WINDOW ? count - first : WINDOW;
        if (!read_keys(table, keys, first, here, wanted))
            return false;
        prefetch(table, wanted, here);
        for (Py_ssize_t i = 0; i < here; i++, end++) {
            const shard_t *shard = shard_of(table, &wanted[i]);
            slot_t *slot = shard->capacity ? look(shard, wanted[i].a, wanted[i].b) : NULL;
            if (!slot || !slot->value)
                return !last || add_run(runs, last, end);
            stamp(table, slot);
            uint32_t value = slot->value;
            if (value != last && last && !add_run(runs, last, end))
                return false;
            last = value;
        }
    }
    return !last || add_run(runs, last, end);
}

typedef enum { FAILED, STALE, ENDED, ON } going_t;

typedef struct {
    const table_t *table;
    PyObject *keys, *runs;
    uint32_t fresh;
} jump_t;

static going_t probe(const jump_t *jump, Py_ssize_t index, uint32_t *value) {
    wanted_t key;
    if (!read_keys(jump->table, jump->keys, index, 1, &key))
        return FAILED;
    const shard_t *shard = shard_of(jump->table, &key);
    const slot_t *slot = shard->capacity ? look(shard, key.a, key.b) : NULL;
    *value = slot ? slot->value : 0;
    return *value && jump->table->tick - slot->stamp > jump->fresh ? STALE : ON;
}

/* The runs that end in (low, high]. */
static going_t between(const jump_t *jump, Py_ssize_t low, uint32_t at_low, Py_ssize_t high, uint32_t at_high) {
    if (at_low == at_high)
        return ON;
    if (high == low + 1)
        return !add_run(jump->runs, at_low, high) ? FAILED : at_high ? ON : ENDED;
    Py_ssize_t middle = low + (high - low) / 2;
    uint32_t value;
    going_t going = probe(jump, middle, &value);
    if (going == ON)
        going = between(jump, low, at_low, middle, value);
    return going == ON ? between(jump, middle, value, high, at_high) : going;
}

static going_t leap(const jump_t *jump, Py_ssize_t count) {
    uint32_t at_low, at_high;
    going_t going = count ? probe(jump, 0, &at_low) : ENDED;
    if (going != ON || !at_low)
        return going;
    wanted_t wanted[WINDOW];
    Py_ssize_t some = 0;
    for (Py_ssize_t at = STRIDE; at < count && some < WINDOW; at += STRIDE, some++)
        if (!read_keys(jump->table, jump->keys, at, 1, &wanted[some]))
            return FAILED;
    prefetch(jump->table, wanted, some);
    for (Py_ssize_t low = 0, high; low < count - 1; low = high, at_low = at_high) {
        high = low + STRIDE < count ? low + STRIDE : count - 1;
        if ((going = probe(jump, high, &at_high)) == ON)
            going = between(jump, low, at_low, high, at_high);
        if (going != ON)
            return going;
    }
    return add_run(jump->runs, at_low, count) ? ON : FAILED;
}

static PyObject *table_runs(table_t *table, PyObject *args) {
    PyObject *given;
    unsigned int tick, fresh;
    if (!PyArg_ParseTuple(args, "OII:runs", &given, &tick, &fresh))
        return NULL;
    PyObject *keys = listed(given), *runs = keys ? PyList_New(0) : NULL;
    Py_ssize_t count = keys ? size_of(keys) : 0;
    jump_t jump = {table, keys, runs, fresh};
    going_t going = FAILED;
    if (runs && enter(table)) {
        table->tick = tick;
        going = leap(&jump, count);
    }
    if (going == STALE) {
        Py_DECREF(runs);
        runs = PyList_New(0);
        going = runs && walk(table, keys, count, runs) ? ON : FAILED;
    }
    if (going == FAILED)
        Py_CLEAR(runs);
    Py_XDECREF(keys);
    return runs;
}

static shard_t *numbered(table_t *table, Py_ssize_t number) {
    if (number >= 0 && number < (Py_ssize_t)table->shard_count)
        return &table->shards[number];
    PyErr_Format(PyExc_IndexError, "shard %zd of %u", number, table->shard_count);
    return NULL;
}

static PyObject *table_sweep(table_t *table, PyObject *args) {
    PyObject *step;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "nO:sweep", &number, &step))
        return NULL;
    steps_t steps = {.step = step, .moved = PyDict_New()};
    shard_t *shard = steps.moved && enter(table) ? numbered(table, number) : NULL;
    if (!shard) {
        Py_XDECREF(steps.moved);
        return NULL;
    }
    slot_t *slots = new_slots(shard->capacity ? shard->capacity : LEAST_SLOTS);
    bool done = slots != NULL;
    table->busy = true;
    for (uint32_t at = 0; done && at < shard->capacity; at++) {
        memo_t *memo = NULL;
        if (!shard->slots[at].value || !(done = (memo = take(&steps, shard->slots[at].value)) != NULL))
            continue;
        memo->times++;
        shard->slots[at].value = memo->new;
    }
    if (slots && shard->capacity) /* also after a failure, so that all that has a value is found */
        refill(shard, slots, shard->capacity);
    else
        PyMem_Free(slots);
    uint32_t capacity = roomy(shard->count);
    if (done && capacity < shard->capacity / 2 && (slots = new_slots(capacity)))
        refill(shard, slots, capacity);
    table->busy = false;
    if (!done || PyErr_Occurred() || !flush_all(&steps))
        Py_CLEAR(steps.moved);
    return steps.moved;
}

static int by_value(const void *a, const void *b) {
    uint32_t first = ((const slot_t *)a)->value, second = ((const slot_t *)b)->value;
    return (first > second) - (first < second);
}

static PyObject *table_content(table_t *table, PyObject *args) {
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "n:content", &number) || !enter(table))
        return NULL;
    const shard_t *shard = numbered(table, number);
    if (!shard)
        return NULL;
    PyObject *keys = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)shard->count * table->key_bytes), *answer = NULL;
    PyObject *values = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)shard->count * (Py_ssize_t)sizeof(uint32_t));
    slot_t *sorted = PyMem_Malloc((size_t)shard->count * sizeof *sorted);
    if (keys && values && sorted) {
        char *key = PyBytes_AsString(keys), *value = PyBytes_AsString(values);
        uint32_t count = 0;
        for (uint32_t at = 0; at < shard->capacity; at++)
            if (shard->slots[at].value)
                sorted[count++] = shard->slots[at];
        qsort(sorted, count, sizeof *sorted, by_value);
        for (uint32_t at = 0; at < count; at++, key += table->key_bytes, value += sizeof(uint32_t)) {
            memcpy(key, &sorted[at], table->key_bytes);
            memcpy(value, &sorted[at].value, sizeof(uint32_t));
        }
        answer = PyTuple_Pack(2, keys, values);
    } else if (keys && values)
        PyErr_NoMemory();
    PyMem_Free(sorted);
    Py_XDECREF(keys);
    Py_XDECREF(values);
    return answer;
}

static Py_ssize_t table_length(table_t *table) {
    Py_ssize_t count = 0;
    for (uint32_t i = 0; i < table->shard_count; i++)
        count += table->shards[i].count;
    return count;
}

static PyObject *table_stamped(table_t *table, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(table->stamped);
}

static PyObject *table_shards(table_t *table, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(table->shard_count);
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"shards", "shard_limit", "key_bytes", NULL};
    Py_ssize_t shards, limit, key_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nnn:Table", names, &shards, &limit, &key_bytes))
        return NULL;
    if (shards < 1 || shards > SHARDS_MAX || (shards & (shards - 1)))
        return PyErr_Format(PyExc_ValueError, "shards: want a power of two up to %d", SHARDS_MAX);
    if (limit < 1 || limit > INT32_MAX / 2)
        return PyErr_Format(PyExc_ValueError, "shard_limit: want 1 to %d", INT32_MAX / 2);
    if (key_bytes != 8 && key_bytes != 16)
        return PyErr_Format(PyExc_ValueError, "key_bytes: want 8 or 16");
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    table_t *table = (table_t *)alloc(type, 0);
    if (!table)
        return NULL;
    table->shard_count = (uint32_t)shards;
    table->shard_limit = (uint32_t)limit;
    table->key_bytes = (uint32_t)key_bytes;
    if (!(table->shards = PyMem_Calloc((size_t)shards, sizeof *table->shards))) {
        Py_DECREF(table);
        return PyErr_NoMemory();
    }
    return (PyObject *)table;
}

static void table_free(table_t *table) {
    PyTypeObject *type = Py_TYPE((PyObject *)table);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (uint32_t i = 0; table->shards && i < table->shard_count; i++)
        PyMem_Free(table->shards[i].slots);
    PyMem_Free(table->shards);
    release(table);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"change", (PyCFunction)table_change, METH_VARARGS, NULL},
    {"runs", (PyCFunction)table_runs, METH_VARARGS, NULL},
    {"sweep", (PyCFunction)table_sweep, METH_VARARGS, NULL},
    {"content", (PyCFunction)table_content, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ATTRIBUTES[] = {
    {"stamped", (getter)table_stamped, NULL, NULL, NULL},
    {"shards", (getter)table_shards, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot TABLE[] = {
    {Py_tp_doc, "The table of headwater.core.keytable, whose contract it keeps."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_free},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {Py_mp_length, table_length},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "headwater._kernels._index.Table",
    .basicsize = sizeof(table_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = TABLE,
};

static int load(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &SPEC, NULL);
    int failed = type ? PyModule_AddObjectRef(module, "Table", type) : -1;
    Py_XDECREF(type);
    return failed;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, load},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._index",
    .m_doc = "The prefix index's table; the contract is in headwater.core.keytable.",
    .m_size = 0,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__index(void) { return PyModuleDef_Init(&MODULE); }
