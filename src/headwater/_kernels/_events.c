/* headwater._kernels._events: the events of a stream that bring tokens, from an instance's connection to the client's.
 *
 * What comes is whole chunks of HTTP (RFC 9112, 7.1) of whole events; anything else is refused as a whole, with nothing
 * done, and is then read with care in Python.  So this file knows only the form that nearly all of a stream has.  The
 * contract is in headwater._kernels.events, and so is the same in Python.
 *
 * Plain CPython limited API of 3.11.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <structmember.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_writer.h"

#define RAW_MAX (64 << 10)          /* more at once is no stream of single tokens */
#define OUT_MAX (RAW_MAX + RAW_MAX / 4) /* `[]`, within at least 15 bytes of its member, becomes `null` */
#define FRAME_MAX 12
#define REPORTED 16

static const char CHOICE[] = "\"choices\":[{", FINISH[] = "\"finish_reason\":\"";
static const char MEMBER[] = "token_ids\"", NONE[] = ":null";
#define LENGTH(text) (sizeof(text) - 1)
enum { CHOICE_RARE = 10, FINISH_RARE = 7, MEMBER_RARE = 5 }; /* their [ and _ */

/* By them objects are told apart that come from Python; kept for good, as kernels are. */
static PyTypeObject *writer_type, *events_type;

/* ---- TokenEvents -------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *job, *name;
    writer_t *writer; /* to the client; NULL before `begin` */
    char *kept;
    size_t kept_bytes, room_bytes, limit_bytes;
    long long unreported;
    bool strips, keeps, ends;
} events_t;

/* What came of some events; nothing is changed before all of them are known to be good. */
typedef struct {
    char *out;
    long long tokens;
    bool ends;
} found_t;

/* Where `what` begins, by its rarest byte: in a few hundred bytes memmem takes longer to begin than this to end. */
static const char *find(const char *at, const char *end, const char *what, size_t bytes, size_t rare) {
    if ((size_t)(end - at) < bytes)
        return NULL;
    const char *last = end - bytes + rare;
    for (const char *here = at + rare; here <= last; here++) {
        here = memchr(here, what[rare], (size_t)(last - here) + 1);
        if (!here)
            return NULL;
        if (memcmp(here - rare, what, bytes) == 0)
            return here - rare;
    }
    return NULL;
}

/* Where the event's list of ids begins, NULL if it has none; false if there are others: of prompts or of a second answer,
 * in another order, with blanks. */
static bool ids(const char *at, const char *end, const char **first) {
    *first = NULL;
    for (const char *here = at; (here = find(here, end, MEMBER, LENGTH(MEMBER), MEMBER_RARE));) {
        const char *after = here + LENGTH(MEMBER);
        size_t left = (size_t)(end - after);
        if (!*first && here - at >= 2 && here[-1] == '"' && here[-2] == ',' && left >= 2 && after[0] == ':' &&
            after[1] == '[')
            *first = after + 2;
        else if (left < LENGTH(NONE) || memcmp(after, NONE, LENGTH(NONE)) != 0)
            return false;
        here = after;
    }
    return true;
}

/* One event, to its end; false if it brings no tokens, or has more than one list of ids. */
static bool one(const events_t *it, const char *at, const char *end, found_t *found) {
    const char *first;
    if (!ids(at, end, &first))
        return false;
    const char *close = first ? memchr(first, ']', (size_t)(end - first)) : NULL;
    if (close) {
        found->tokens += close > first;
        for (const char *comma = first; (comma = memchr(comma, ',', (size_t)(close - comma))); comma++)
            found->tokens++;
    } else if (find(at, end, CHOICE, LENGTH(CHOICE), CHOICE_RARE)) {
        found->tokens++;
    } else {
        return false;
    }
    if (close && it->strips) {
        size_t before = (size_t)(first - 1 - at), after = (size_t)(end - close - 1);
        memcpy(found->out, at, before);
        memcpy(found->out + before, "null", 4);
        memcpy(found->out + before + 4, close + 1, after);
        found->out += before + 4 + after;
    } else {
        memcpy(found->out, at, (size_t)(end - at));
        found->out += end - at;
    }
    found->ends = find(at, end, FINISH, LENGTH(FINISH), FINISH_RARE) != NULL;
    return true;
}

/* Whole events, one after the other; false if one of them brings no tokens, or they do not end with an event. */
static bool all(const events_t *it, const char *at, const char *end, found_t *found) {
    if (memchr(at, '\r', (size_t)(end - at)))
        return false;
    while (at < end) {
        const char *stop = find(at, end, "\n\n", 2, 0);
        if (!stop || !one(it, at, stop + 2, found))
            return false;
        at = stop + 2;
    }
    return true;
}

static int digit(char it) {
    if (it >= '0' && it <= '9')
        return it - '0';
    it |= 32;
    return it >= 'a' && it <= 'f' ? it - 'a' + 10 : -1;
}

/* The payload of the chunk at `*at`, which then is behind it; NULL if it is none that ends before `end`. */
static const char *payload(const char **at, const char *end, size_t *bytes) {
    const char *here = *at;
    size_t size = 0;
    int value;
    for (; here < end && here - *at < 8 && (value = digit(*here)) >= 0; here++)
        size = size * 16 + (size_t)value;
    if (!size || end - here < 4 || here[0] != '\r' || here[1] != '\n' || size > (size_t)(end - here - 4))
        return NULL;
    here += 2;
    if (here[size] != '\r' || here[size + 1] != '\n')
        return NULL;
    *at = here + size + 2;
    *bytes = size;
    return here;
}

/* ---- what is kept and counted ------------------------------------------------------------------------------- */

static void keep_none(events_t *it) {
    PyMem_Free(it->kept);
    it->kept = NULL;
    it->kept_bytes = it->room_bytes = 0;
    it->keeps = false;
}

/* Keep an event for whoever would have to go on; false without memory. */
static bool keep(events_t *it, const char *at, size_t bytes) {
    if (!it->keeps)
        return true;
    size_t need = it->kept_bytes + bytes;
    if (need > it->limit_bytes) {
        keep_none(it);
        return true;
    }
    if (need > it->room_bytes) {
        size_t room = it->room_bytes ? it->room_bytes : 4096;
        while (room < need)
            room *= 2;
        char *grown = PyMem_Realloc(it->kept, room);
        if (!grown) {
            PyErr_NoMemory();
            return false;
        }
        it->kept = grown;
        it->room_bytes = room;
    }
    memcpy(it->kept + it->kept_bytes, at, bytes);
    it->kept_bytes = need;
    return true;
}

static bool count(events_t *it, long long tokens) {
    it->unreported += tokens;
    PyObject *before = PyObject_GetAttr(it->job, it->name), *more = PyLong_FromLongLong(tokens), *sum = NULL;
    if (before && more)
        sum = PyNumber_Add(before, more);
    bool done = sum && PyObject_SetAttr(it->job, it->name, sum) == 0;
    Py_XDECREF(before);
    Py_XDECREF(more);
    Py_XDECREF(sum);
    return done;
}

/* ---- methods ------------------------------------------------------------------------------------------------ */

/* What `feed` answers; -1 with an exception. */
static int feed(events_t *it, PyObject *raw) {
    char *at, out[FRAME_MAX + OUT_MAX + 2]; /* in front of the events, their frame */
    Py_ssize_t raw_bytes;
    if (PyBytes_AsStringAndSize(raw, &at, &raw_bytes) < 0)
        return -1;
    if (!raw_bytes || raw_bytes > RAW_MAX || !it->writer)
        return 0;
    const char *here = at, *end = at + raw_bytes, *events;
    found_t found = {out + FRAME_MAX, 0, it->ends};
    size_t bytes;
    while (here < end)
        if (!(events = payload(&here, end, &bytes)) || !all(it, events, events + bytes, &found))
            return 0;
    for (here = at; here < end;) {
        events = payload(&here, end, &bytes);
        if (!keep(it, events, bytes))
            return -1;
    }
    it->ends = found.ends;
    if (!count(it, found.tokens))
        return -1;
    char *start = out + FRAME_MAX;
    size_t size = (size_t)(found.out - start);
    *--start = '\n';
    *--start = '\r';
    do
        *--start = "0123456789abcdef"[size & 15];
    while (size >>= 4);
    *found.out++ = '\r';
    *found.out++ = '\n';
    if (!put(it->writer, (const struct iovec[2]){{start, (size_t)(found.out - start)}, {"", 0}}))
        return -1;
    return it->unreported < REPORTED ? 1 : 2;
}

static PyObject *feed_called(events_t *it, PyObject *raw) {
    int done = feed(it, raw);
    return done < 0 ? NULL : PyLong_FromLong(done);
}

static PyObject *called(events_t *it, PyObject *args, PyObject *kwargs) {
    PyObject *raw;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "TokenEvents are called with data only");
    return PyArg_ParseTuple(args, "O:TokenEvents", &raw) ? feed_called(it, raw) : NULL;
}

static PyObject *take(events_t *it, PyObject *event) {
    char *at;
    Py_ssize_t bytes;
    if (PyBytes_AsStringAndSize(event, &at, &bytes) < 0)
        return NULL;
    char small[4096], *out = (size_t)bytes + 2 > sizeof small ? PyMem_Malloc((size_t)bytes + 2) : small;
    if (!out)
        return PyErr_NoMemory();
    found_t found = {out, 0, false};
    PyObject *said = NULL;
    if (!one(it, at, at + bytes, &found)) {
        said = Py_None;
        Py_INCREF(said);
    } else if (keep(it, at, (size_t)bytes) && count(it, found.tokens)) {
        it->ends = found.ends;
        said = PyBytes_FromStringAndSize(out, found.out - out);
    }
    if (out != small)
        PyMem_Free(out);
    return said;
}

static PyObject *add(events_t *it, PyObject *args) {
    char *at;
    Py_ssize_t bytes;
    long long tokens;
    PyObject *event;
    if (!PyArg_ParseTuple(args, "SL:add", &event, &tokens) || PyBytes_AsStringAndSize(event, &at, &bytes) < 0 ||
        !keep(it, at, (size_t)bytes))
        return NULL;
    it->ends = find(at, at + bytes, FINISH, LENGTH(FINISH), FINISH_RARE) != NULL;
    if (!count(it, tokens))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *report(events_t *it, PyObject *nothing) {
    (void)nothing;
    if (it->unreported < REPORTED)
        Py_RETURN_FALSE;
    it->unreported = 0;
    Py_RETURN_TRUE;
}

static PyObject *kept(events_t *it, PyObject *nothing) {
    (void)nothing;
    return PyBytes_FromStringAndSize(it->kept, (Py_ssize_t)it->kept_bytes);
}

static PyObject *get_ends(events_t *it, void *closure) {
    (void)closure;
    return PyBool_FromLong(it->ends);
}

static PyObject *get_keeps(events_t *it, void *closure) {
    (void)closure;
    return PyBool_FromLong(it->keeps);
}

static PyObject *begin(events_t *it, PyObject *writer) {
    if (it->writer)
        return PyErr_Format(PyExc_ValueError, "it has begun");
    if (Py_TYPE(writer) != writer_type)
        return PyErr_Format(PyExc_TypeError, "it begins with a Writer");
    Py_INCREF(writer);
    it->writer = (writer_t *)writer;
    Py_RETURN_NONE;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"job", "strips", "keep_bytes", NULL};
    PyObject *job;
    int strips;
    Py_ssize_t keep_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$pn:TokenEvents", names, &job, &strips, &keep_bytes))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    events_t *it = (events_t *)alloc(type, 0);
    if (!it)
        return NULL;
    if (!(it->name = PyUnicode_InternFromString("answered_tokens"))) {
        Py_DECREF(it);
        return NULL;
    }
    Py_INCREF(job);
    it->job = job;
    it->strips = strips;
    it->keeps = keep_bytes > 0;
    it->limit_bytes = keep_bytes > 0 ? (size_t)keep_bytes : 0;
    return (PyObject *)it;
}

static int traverse(events_t *it, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)it));
    Py_VISIT(it->job);
    Py_VISIT((PyObject *)it->writer);
    return 0;
}

static int clear(events_t *it) {
    PyObject *writer = (PyObject *)it->writer;
    it->writer = NULL;
    Py_CLEAR(it->job);
    Py_XDECREF(writer);
    return 0;
}

static void release(events_t *it) {
    PyTypeObject *type = Py_TYPE((PyObject *)it);
    PyObject_GC_UnTrack(it);
    clear(it);
    Py_CLEAR(it->name);
    PyMem_Free(it->kept);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(it);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"begin", (PyCFunction)begin, METH_O, NULL},
    {"feed", (PyCFunction)feed_called, METH_O, NULL},
    {"take", (PyCFunction)take, METH_O, NULL},
    {"add", (PyCFunction)add, METH_VARARGS, NULL},
    {"report", (PyCFunction)report, METH_NOARGS, NULL},
    {"kept", (PyCFunction)kept, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ATTRIBUTES[] = {
    {"ends", (getter)get_ends, NULL, NULL, NULL},
    {"keeps", (getter)get_keeps, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot EVENTS[] = {
    {Py_tp_doc, "See headwater._kernels.events, whose contract it keeps."},
    {Py_tp_new, new},
    {Py_tp_dealloc, release},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_call, called},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, ATTRIBUTES},
    {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "headwater._kernels._events.TokenEvents",
    .basicsize = sizeof(events_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = EVENTS,
};

/* ---- Receiver ----------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *quick, *received, *reported; /* who is asked first, NULL or None for nobody; names of methods */
    char heard;
} receiver_t;

static PyObject *data_received(receiver_t *it, PyObject *data) {
    PyObject *quick = it->quick;
    if (quick && quick != Py_None && PyBytes_Check(data) && PyBytes_Size(data) < RAW_MAX) {
        Py_INCREF(quick); /* whoever is called may set another one */
        long done;
        if (Py_TYPE(quick) == events_type) {
            done = feed((events_t *)quick, data);
        } else {
            PyObject *answer = PyObject_CallFunctionObjArgs(quick, data, NULL);
            done = answer ? PyLong_AsLong(answer) : -1;
            Py_XDECREF(answer);
        }
        Py_DECREF(quick);
        if (done < 0 && PyErr_Occurred())
            return NULL;
        if (done) {
            it->heard = 1;
            if (done > 1)
                return PyObject_CallMethodObjArgs((PyObject *)it, it->reported, NULL);
            Py_RETURN_NONE;
        }
    }
    return PyObject_CallMethodObjArgs((PyObject *)it, it->received, data, NULL);
}

static PyObject *receiver_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    receiver_t *it = (receiver_t *)alloc(type, 0);
    if (it && (!(it->received = PyUnicode_InternFromString("received")) ||
               !(it->reported = PyUnicode_InternFromString("reported"))))
        Py_CLEAR(it);
    return (PyObject *)it;
}

static int receiver_traverse(receiver_t *it, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)it));
    Py_VISIT(it->quick);
    return 0;
}

static int receiver_clear(receiver_t *it) {
    Py_CLEAR(it->quick);
    return 0;
}

static void receiver_release(receiver_t *it) {
    PyTypeObject *type = Py_TYPE((PyObject *)it);
    PyObject_GC_UnTrack(it);
    receiver_clear(it);
    Py_CLEAR(it->received);
    Py_CLEAR(it->reported);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(it);
    Py_DECREF(type);
}

static PyMethodDef RECEIVER_METHODS[] = {
    {"data_received", (PyCFunction)data_received, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef RECEIVER_MEMBERS[] = {
    {"quick", T_OBJECT, offsetof(receiver_t, quick), 0, NULL},
    {"heard", T_BOOL, offsetof(receiver_t, heard), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot RECEIVER[] = {
    {Py_tp_doc, "See headwater._kernels.events, whose contract it keeps."},
    {Py_tp_new, receiver_new},
    {Py_tp_dealloc, receiver_release},
    {Py_tp_traverse, receiver_traverse},
    {Py_tp_clear, receiver_clear},
    {Py_tp_methods, RECEIVER_METHODS},
    {Py_tp_members, RECEIVER_MEMBERS},
    {0, NULL},
};

static PyType_Spec RECEIVER_SPEC = {
    .name = "headwater._kernels._events.Receiver",
    .basicsize = sizeof(receiver_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = RECEIVER,
};

static PyTypeObject *added(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddObjectRef(module, name, type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int load(PyObject *module) {
    writer_type = added(module, "Writer", &WRITER_SPEC);
    events_type = writer_type ? added(module, "TokenEvents", &SPEC) : NULL;
    PyTypeObject *receiver = events_type ? added(module, "Receiver", &RECEIVER_SPEC) : NULL;
    if (!receiver)
        return -1;
    Py_DECREF((PyObject *)receiver);
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, load},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._events",
    .m_doc = "Streams' events; the contract is in headwater._kernels.events.",
    .m_size = 0,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__events(void) { return PyModuleDef_Init(&MODULE); }
