/* The Writer of headwater._kernels.events: to a client's or an instance's socket, in order with its transport. */
#ifndef HEADWATER_WRITER_H
#define HEADWATER_WRITER_H

#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

typedef struct {
    PyObject_HEAD
    PyObject *write, *closing, *unsent; /* methods of the transport */
    int fd;                             /* its socket; -1 if that is not to be written to */
} writer_t;

/* A method's answer as a number; -1 with an exception. */
static long asked(PyObject *method) {
    PyObject *answer = PyObject_CallNoArgs(method);
    long value = answer ? PyLong_AsLong(answer) : -1;
    Py_XDECREF(answer);
    return value;
}

/* What of it the socket takes at once, if nothing waits to be written before it. A socket is closed only after its
 * protocol was told so, who writes nothing then: until then `fd` is no other's. -1 with an exception. */
static Py_ssize_t sent_at_once(writer_t *it, const struct iovec pieces[2]) {
    if (it->fd < 0)
        return 0;
    long held = asked(it->closing);
    if (!held)
        held = asked(it->unsent);
    if (held)
        return held < 0 && PyErr_Occurred() ? -1 : 0;
    struct msghdr message = {.msg_iov = (struct iovec *)pieces, .msg_iovlen = pieces[1].iov_len ? 2 : 1};
    ssize_t sent = sendmsg(it->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 ? 0 : sent;
}

/* Write both pieces: what the socket does not take at once goes by the transport. False with an exception. */
static bool put(writer_t *it, const struct iovec pieces[2]) {
    Py_ssize_t sent = sent_at_once(it, pieces);
    if (sent < 0)
        return false;
    size_t left = pieces[0].iov_len + pieces[1].iov_len - (size_t)sent;
    if (!left)
        return true;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)left);
    if (!rest)
        return false;
    char *to = PyBytes_AsString(rest);
    for (int number = 0; number < 2; number++) {
        size_t bytes = pieces[number].iov_len, skip = (size_t)sent < bytes ? (size_t)sent : bytes;
        memcpy(to, (const char *)pieces[number].iov_base + skip, bytes - skip);
        to += bytes - skip;
        sent -= (Py_ssize_t)skip;
    }
    PyObject *written = PyObject_CallFunctionObjArgs(it->write, rest, NULL);
    Py_DECREF(rest);
    Py_XDECREF(written);
    return written != NULL;
}

static PyObject *writer_write(writer_t *it, PyObject *args) {
    PyObject *head, *body = NULL;
    if (!PyArg_ParseTuple(args, "S|S:write", &head, &body))
        return NULL;
    struct iovec pieces[2] = {{PyBytes_AsString(head), (size_t)PyBytes_Size(head)}, {"", 0}};
    if (body)
        pieces[1] = (struct iovec){PyBytes_AsString(body), (size_t)PyBytes_Size(body)};
    if (!put(it, pieces))
        return NULL;
    Py_RETURN_NONE;
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
    {Py_tp_doc, "See headwater._kernels.events, whose contract it keeps."},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_release},
    {Py_tp_traverse, writer_traverse},
    {Py_tp_clear, writer_clear},
    {Py_tp_methods, WRITER_METHODS},
    {0, NULL},
};

static PyType_Spec WRITER_SPEC = {
    .name = "headwater._kernels._events.Writer",
    .basicsize = sizeof(writer_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = WRITER,
};

#endif
