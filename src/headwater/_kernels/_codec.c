/* headwater._kernels._codec: how payloads are changed on their way into a lower tier, with the GIL released.
 *
 * A call is checked whole, then run whole; a refused call has written nothing.  The contracts are in
 * headwater._kernels.codec, the loops in _planes.h and _quant.h.
 *
 * Plain CPython limited API of 3.11.  Nothing is kept but the best instruction set here, in the module state.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "_planes.h"
#include "_quant.h"

/* ---- instruction sets: the same loops, compiled for each ------------------------------------------------ */

typedef struct {
    const char *name;
    void (*split)(uint8_t *, const uint8_t *, size_t, size_t), (*join)(uint8_t *, const uint8_t *, size_t, size_t);
    bool (*quantise)(const quant_t *), (*dequantise)(const quant_t *);
} isa_t;

#define DEFINE_ISA(NAME, ISA)                                                                             \
    ISA static void split_##NAME(uint8_t *target, const uint8_t *source, size_t count, size_t bytes) {    \
        planes_split(target, source, count, bytes);                                                       \
    }                                                                                                     \
    ISA static void join_##NAME(uint8_t *target, const uint8_t *source, size_t count, size_t bytes) {     \
        planes_join(target, source, count, bytes);                                                        \
    }                                                                                                     \
    ISA static bool quantise_##NAME(const quant_t *q) { return quantise_all(q); }                         \
    ISA static bool dequantise_##NAME(const quant_t *q) { return dequantise_all(q); }

#define ISA_OF(NAME) {#NAME, split_##NAME, join_##NAME, quantise_##NAME, dequantise_##NAME}

#if defined(__x86_64__)
DEFINE_ISA(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
DEFINE_ISA(avx2, __attribute__((target("avx2"))))
#endif
DEFINE_ISA(plain, )

static const isa_t ISAS[] = {
#if defined(__x86_64__)
    ISA_OF(avx512),
    ISA_OF(avx2),
#endif
    ISA_OF(plain),
};
#define ISA_COUNT (sizeof ISAS / sizeof *ISAS)

static bool machine_has(const isa_t *isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(isa->name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(isa->name, "avx2"))
        return __builtin_cpu_supports("avx2");
#endif
    (void)isa;
    return true;
}

typedef struct {
    const isa_t *best;
} state_t;

/* The instruction set called `name`, the best for NULL; NULL and ValueError for one that is not here. */
static const isa_t *isa_find(PyObject *module, const char *name) {
    if (!name)
        return ((state_t *)PyModule_GetState(module))->best;
    for (size_t i = 0; i < ISA_COUNT; i++)
        if (!strcmp(name, ISAS[i].name) && machine_has(&ISAS[i]))
            return &ISAS[i];
    PyErr_Format(PyExc_ValueError, "isa %s is not available here", name);
    return NULL;
}

/* ---- arguments ------------------------------------------------------------------------------------------ */

/* A borrowed 1-D, contiguous, aligned array of `format`, writable where that is asked for. */
static bool array_get(PyObject *object, const char *name, const char *format, size_t alignment, bool written,
                      Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_RECORDS_RO) < 0)
        return false;
    const char *given = view->format ? view->format : "B";
    if (strcmp(given, format))
        PyErr_Format(PyExc_TypeError, "%s: want format %s, got %s", name, format, given);
    else if (view->ndim != 1)
        PyErr_Format(PyExc_ValueError, "%s: want 1 dimension, got %d", name, view->ndim);
    else if (view->shape[0] > 1 && view->strides[0] != view->itemsize)
        PyErr_Format(PyExc_ValueError, "%s: not contiguous", name);
    else if (view->shape[0] && (uintptr_t)view->buf % alignment)
        PyErr_Format(PyExc_ValueError, "%s: not aligned", name);
    else if (written && view->readonly)
        PyErr_Format(PyExc_ValueError, "%s: read-only", name);
    else
        return true;
    PyBuffer_Release(view);
    return false;
}

/* An int from 1 on. */
static bool count_get(PyObject *object, const char *name, size_t *value) {
    PyObject *index = PyNumber_Index(object);
    if (!index)
        return false;
    Py_ssize_t number = PyLong_AsSsize_t(index);
    Py_DECREF(index);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return false;
        PyErr_Clear();
        number = 0;
    }
    *value = (size_t)number;
    if (number >= 1)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: want 1 to 2**63", name);
    return false;
}

/* ---- planes --------------------------------------------------------------------------------------------- */

static PyObject *planes(PyObject *module, PyObject *args, PyObject *kwargs, bool split) {
    static char *names[] = {"source", "target", "element_bytes", "isa", NULL};
    PyObject *objects[2], *number = NULL, *result = NULL;
    Py_buffer views[2];
    size_t element_bytes;
    const char *isa_name = NULL;
    int held = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$Oz", names, &objects[0], &objects[1], &number, &isa_name))
        return NULL;
    if (!number)
        return PyErr_Format(PyExc_TypeError, "element_bytes: missing");
    const isa_t *isa = isa_find(module, isa_name);
    if (!isa || !count_get(number, names[2], &element_bytes))
        return NULL;
    if (element_bytes != 2 && element_bytes != 4)
        return PyErr_Format(PyExc_ValueError, "element_bytes: want 2 or 4");
    for (; held < 2; held++)
        if (!array_get(objects[held], names[held], "B", 1, held == 1, &views[held]))
            goto done;
    if (views[0].len != views[1].len || (size_t)views[0].len % element_bytes) {
        PyErr_SetString(PyExc_ValueError, "source and target: not equally long, or not whole elements");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    (split ? isa->split : isa->join)(views[1].buf, views[0].buf, (size_t)views[0].len / element_bytes, element_bytes);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *shuffle(PyObject *module, PyObject *args, PyObject *kwargs) {
    return planes(module, args, kwargs, true);
}

static PyObject *unshuffle(PyObject *module, PyObject *args, PyObject *kwargs) {
    return planes(module, args, kwargs, false);
}

/* ---- int8 ----------------------------------------------------------------------------------------------- */

static bool element_find(const char *name, element_t *element) {
    for (size_t i = 0; i < ELEMENT_COUNT; i++)
        if (!strcmp(name, ELEMENTS[i].name)) {
            *element = (element_t)i;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "element: want bfloat16, float16 or float32, got %s", name);
    return false;
}

/* Do the arrays have exactly the sizes that the shape says? */
static bool sizes_fit(const quant_t *q, const Py_buffer *views) {
    size_t spans = (q->blocks - 1) / q->span_blocks + 1, elements, scales, bytes;
    bool over = __builtin_mul_overflow(q->layers, q->runs, &elements) |
                __builtin_mul_overflow(elements, q->channels, &elements) |
                __builtin_mul_overflow(elements, spans, &scales) | __builtin_mul_overflow(scales, 4, &scales) |
                __builtin_mul_overflow(elements, q->blocks, &elements) |
                __builtin_mul_overflow(elements, q->rows, &elements) |
                __builtin_mul_overflow(elements, ELEMENTS[q->element].bytes, &bytes);
    if (!over && bytes == (size_t)views[0].len && scales == (size_t)views[1].len && elements == (size_t)views[2].len)
        return true;
    PyErr_SetString(PyExc_ValueError, "source, scales and data: not of the sizes that the shape says");
    return false;
}

static PyObject *quant(PyObject *module, PyObject *args, PyObject *kwargs, bool forth) {
    static char *names[] = {"source", "scales", "data", "element",  "layers", "blocks",
                            "span_blocks", "runs", "rows", "channels", "isa", NULL};
    PyObject *objects[3], *numbers[6] = {NULL}, *result = NULL;
    Py_buffer views[3];
    const char *element = NULL, *isa_name = NULL;
    quant_t q;
    size_t *counts[] = {&q.layers, &q.blocks, &q.span_blocks, &q.runs, &q.rows, &q.channels};
    int held = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$sOOOOOOz", names, &objects[0], &objects[1], &objects[2],
                                     &element, &numbers[0], &numbers[1], &numbers[2], &numbers[3], &numbers[4],
                                     &numbers[5], &isa_name))
        return NULL;
    if (!element)
        return PyErr_Format(PyExc_TypeError, "element: missing");
    const isa_t *isa = isa_find(module, isa_name);
    if (!isa || !element_find(element, &q.element))
        return NULL;
    for (int i = 0; i < 6; i++) {
        if (!numbers[i])
            return PyErr_Format(PyExc_TypeError, "%s: missing", names[4 + i]);
        if (!count_get(numbers[i], names[4 + i], counts[i]))
            return NULL;
    }
    const char *formats[] = {"B", "f", "b"};
    const size_t alignments[] = {ELEMENTS[q.element].bytes, sizeof(float), 1};
    for (; held < 3; held++)
        if (!array_get(objects[held], names[held], formats[held], alignments[held], forth == (held > 0),
                       &views[held]))
            goto done;
    q.source = views[0].buf, q.scales = views[1].buf, q.data = views[2].buf;
    if (!sizes_fit(&q, views))
        goto done;
    bool possible;
    Py_BEGIN_ALLOW_THREADS
    possible = (forth ? isa->quantise : isa->dequantise)(&q);
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(possible);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *quantise(PyObject *module, PyObject *args, PyObject *kwargs) {
    return quant(module, args, kwargs, true);
}

static PyObject *dequantise(PyObject *module, PyObject *args, PyObject *kwargs) {
    return quant(module, args, kwargs, false);
}

/* ---- module --------------------------------------------------------------------------------------------- */

static int module_exec(PyObject *module) {
    state_t *state = PyModule_GetState(module);
    PyObject *names = PyList_New(0);
    int failed = !names;
    for (size_t i = 0; i < ISA_COUNT && !failed; i++) {
        if (!machine_has(&ISAS[i]))
            continue;
        state->best = state->best ? state->best : &ISAS[i];
        PyObject *name = PyUnicode_FromString(ISAS[i].name);
        failed = !name || PyList_Append(names, name) < 0;
        Py_XDECREF(name);
    }
    PyObject *isas = failed ? NULL : PyList_AsTuple(names);
    failed = !isas || PyModule_AddObjectRef(module, "ISAS", isas) < 0;
    Py_XDECREF(isas);
    Py_XDECREF(names);
    return failed ? -1 : 0;
}

#define METHOD(NAME) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_VARARGS | METH_KEYWORDS, NULL}

static PyMethodDef METHODS[] = {
    METHOD(shuffle), METHOD(unshuffle), METHOD(quantise), METHOD(dequantise), {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._codec",
    .m_doc = "Payloads changed with the GIL released; the contracts are in headwater._kernels.codec.",
    .m_size = sizeof(state_t),
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__codec(void) {
    return PyModuleDef_Init(&MODULE);
}
