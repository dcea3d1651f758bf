/* headwater._kernels._messages: HTTP messages that came whole, in one piece, and how one is written.
 *
 * The contract, and the same in Python, are in headwater._kernels.messages.
 *
 * Plain CPython limited API of 3.11.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define DIGITS_MAX 15
#define KEY_MAX 2048

static const char END[] = "\r\n\r\n", STATED[] = "\r\nContent-Length: ", LOWER[] = "\r\ncontent-length: ";
#define STATED_BYTES (sizeof STATED - 1)

static PyObject *find(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *heads, *data;
    char *at;
    Py_ssize_t bytes, head_max, lines_max;
    if (!PyArg_ParseTuple(args, "O!Snn:find", &PyDict_Type, &heads, &data, &head_max, &lines_max) ||
        PyBytes_AsStringAndSize(data, &at, &bytes) < 0)
        return NULL;
    size_t window = (size_t)(bytes < KEY_MAX ? bytes : KEY_MAX);
    const char *end = memmem(at, window, END, sizeof END - 1);
    if (!end || end + 4 - at > head_max)
        Py_RETURN_NONE;
    size_t head = (size_t)(end - at);
    Py_ssize_t lines = 0;
    for (const char *line = at; (line = memchr(line, '\n', (size_t)(end - line))); line++)
        lines++;
    const char *stated = memmem(at, head, STATED, STATED_BYTES);
    if (!stated)
        stated = memmem(at, head, LOWER, STATED_BYTES);
    if (!stated || lines > lines_max)
        Py_RETURN_NONE;
    const char *digit = stated + STATED_BYTES, *first = digit;
    long long length = 0;
    for (; digit < end && *digit >= '0' && *digit <= '9' && digit - first <= DIGITS_MAX; digit++)
        length = length * 10 + (*digit - '0');
    if (digit == first || digit - first > DIGITS_MAX || (digit < end && (digit[0] != '\r' || digit[1] != '\n')) ||
        length != bytes - (Py_ssize_t)head - 4)
        Py_RETURN_NONE;
    char key[KEY_MAX];
    size_t before = (size_t)(stated - at), after = (size_t)(end - digit);
    memcpy(key, at, before);
    memcpy(key + before, digit, after);
    PyObject *name = PyBytes_FromStringAndSize(key, (Py_ssize_t)(before + after));
    if (!name)
        return NULL;
    PyObject *known = PyDict_GetItemWithError(heads, name); /* borrowed */
    Py_DECREF(name);
    if (!known) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    PyObject *body = PyBytes_FromStringAndSize(end + 4, (Py_ssize_t)length);
    PyObject *found = body ? PyTuple_Pack(2, known, body) : NULL;
    Py_XDECREF(body);
    return found;
}

/* ---- Writer ------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *write, *closing, *unsent; /* methods of the transport */
    int fd;                             /* its socket; -1 if that is not to be written to */
} writer_t;

/* A method's answer as a number; -1 with an exception. */
static long asked(PyObject *method) {
    PyObject *answer = PyObject_CallFunctionObjArgs(method, NULL);
    long value = answer ? PyLong_AsLong(answer) : -1;
    Py_XDECREF(answer);
    return value;
}

/* What of it the socket takes at once, if nothing waits to be written before it. A socket is closed only after its
 * protocol was told so, who writes nothing then: until then `fd` is no other's. -1 with an exception. */
static Py_ssize_t sent_at_once(writer_t *it, const struct iovec *pieces, size_t count) {
    if (it->fd < 0)
        return 0;
    long held = asked(it->closing);
    if (!held)
        held = asked(it->unsent);
    if (held)
        return held < 0 && PyErr_Occurred() ? -1 : 0;
    struct msghdr message = {.msg_iov = (struct iovec *)pieces, .msg_iovlen = count};
    ssize_t sent = sendmsg(it->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 ? 0 : sent;
}

static PyObject *writer_write(writer_t *it, PyObject *args) {
    PyObject *head, *body = NULL;
    if (!PyArg_ParseTuple(args, "S|S:write", &head, &body))
        return NULL;
    struct iovec pieces[2] = {{PyBytes_AsString(head), (size_t)PyBytes_Size(head)}, {"", 0}};
    if (body)
        pieces[1] = (struct iovec){PyBytes_AsString(body), (size_t)PyBytes_Size(body)};
    Py_ssize_t sent = sent_at_once(it, pieces, body ? 2 : 1);
    if (sent < 0)
        return NULL;
    size_t left = pieces[0].iov_len + pieces[1].iov_len - (size_t)sent;
    if (!left)
        Py_RETURN_NONE;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)left);
    if (!rest)
        return NULL;
    char *to = PyBytes_AsString(rest);
    for (int number = 0; number < 2; number++) {
        size_t bytes = pieces[number].iov_len, skip = (size_t)sent < bytes ? (size_t)sent : bytes;
        memcpy(to, (const char *)pieces[number].iov_base + skip, bytes - skip);
        to += bytes - skip;
        sent -= (Py_ssize_t)skip;
    }
    PyObject *written = PyObject_CallFunctionObjArgs(it->write, rest, NULL);
    Py_DECREF(rest);
    return written;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *transport;
    int fd;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Writer takes a transport and a descriptor");
    if (!PyArg_ParseTuple(args, "Oi:Writer", &transport, &fd))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    writer_t *it = (writer_t *)alloc(type, 0);
    if (!it)
        return NULL;
    it->fd = fd;
    it->write = PyObject_GetAttrString(transport, "write");
    it->closing = PyObject_GetAttrString(transport, "is_closing");
    it->unsent = PyObject_GetAttrString(transport, "get_write_buffer_size");
    if (!it->write || !it->closing || !it->unsent) {
        Py_DECREF(it);
        return NULL;
    }
    return (PyObject *)it;
}

static int writer_traverse(writer_t *it, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)it));
    Py_VISIT(it->write);
    Py_VISIT(it->closing);
    Py_VISIT(it->unsent);
    return 0;
}

static int writer_clear(writer_t *it) {
    Py_CLEAR(it->write);
    Py_CLEAR(it->closing);
    Py_CLEAR(it->unsent);
    return 0;
}

static void writer_release(writer_t *it) {
    PyTypeObject *type = Py_TYPE((PyObject *)it);
    PyObject_GC_UnTrack(it);
    writer_clear(it);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(it);
    Py_DECREF(type);
}

static PyMethodDef WRITER_METHODS[] = {
    {"write", (PyCFunction)writer_write, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot WRITER[] = {
    {Py_tp_doc, "See headwater._kernels.messages, whose contract it keeps."},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_release},
    {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear},
    {Py_tp_methods, WRITER_METHODS},
    {0, NULL},
};

static PyType_Spec WRITER_SPEC = {
    .name = "headwater._kernels._messages.Writer",
    .basicsize = sizeof(writer_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = WRITER,
};

static int load(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &WRITER_SPEC, NULL);
    int failed = type ? PyModule_AddObjectRef(module, "Writer", type) : -1;
    Py_XDECREF(type);
    return failed;
}

static PyMethodDef METHODS[] = {
    {"find", find, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, load},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._messages",
    .m_doc = "HTTP messages in one piece; the contract is in headwater._kernels.messages.",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__messages(void) { return PyModuleDef_Init(&MODULE); }
