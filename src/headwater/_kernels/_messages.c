/* headwater._kernels._messages: HTTP messages that came whole, in one piece.
 *
 * The contract, and the same in Python, are in headwater._kernels.messages.
 *
 * Plain CPython limited API of 3.11.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <string.h>

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
    PyObject *known = PyDict_GetItemWithError(heads, name);
    Py_DECREF(name);
    Py_XINCREF(known); /* what is made below may have garbage collected, and that call anybody */
    if (!known) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    PyObject *body = PyBytes_FromStringAndSize(end + 4, (Py_ssize_t)length);
    PyObject *found = body ? PyTuple_Pack(2, known, body) : NULL;
    Py_DECREF(known);
    Py_XDECREF(body);
    return found;
}

static PyMethodDef METHODS[] = {
    {"find", find, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
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
