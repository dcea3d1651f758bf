/* headwater._kernels._copy: lists of copies between addresses of this process, with the GIL released.
 *
 * A call is checked whole, then run whole.  Checking reads the arguments and raises; running touches memory and
 * cannot fail.  A refused call has therefore copied nothing.
 *
 *   copyv     piece k           targets[k]                      <- sources[k]                       lengths[k]
 *   gather    piece (layer, i)  places[i] + layer*layer_stride  <- bases[layer] + blocks[i]*stride  block_bytes
 *   scatter   the same pieces with the two sides exchanged
 *
 * Plain CPython limited API of 3.11.  All that is kept is in the module state: the best instruction set here.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_stream.h"

#if UINTPTR_MAX != UINT64_MAX
#error "addresses are 64 bits wide here"
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define ADDRESS_END (UINT64_C(1) << 63)        /* user addresses are below it, so sums of two never wrap */
#define STREAM_MIN_BYTES (UINT64_C(256) << 10) /* of a whole call: less may be read again at once */
#define STREAM_MIN_PIECE UINT64_C(1024)        /* shorter pieces are mostly head and tail */

/* ---- instruction sets ----------------------------------------------------------------------------------- */

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

/* ---- plans: a checked request, and its pieces ----------------------------------------------------------- */

typedef struct {
    char *target;
    const char *source;
    size_t length;
} piece_t;

typedef struct plan {
    piece_t (*piece)(const struct plan *, uint64_t k);
    uint64_t pieces, total_bytes;
    const uint64_t *targets, *sources, *lengths; /* copyv */
    const uint64_t *bases, *places;               /* gather, scatter */
    const int64_t *blocks;
    uint64_t layer_count, block_count, block_bytes, stride_bytes, layer_stride_bytes;
} plan_t;

static piece_t copyv_piece(const plan_t *p, uint64_t k) {
    return (piece_t){(char *)p->targets[k], (const char *)p->sources[k], p->lengths[k]};
}

/* Layer by layer: the packed side is then walked in the order of its addresses, which is what its DRAM rows, its
 * page tables and, when it is read, the hardware prefetcher like best.  The paged side is scattered either way. */
static piece_t gather_piece(const plan_t *p, uint64_t k) {
    uint64_t layer = k / p->block_count, i = k % p->block_count;
    return (piece_t){(char *)(p->places[i] + layer * p->layer_stride_bytes),
                     (const char *)(p->bases[layer] + (uint64_t)p->blocks[i] * p->stride_bytes),
                     p->block_bytes};
}

static piece_t scatter_piece(const plan_t *p, uint64_t k) {
    piece_t gathered = gather_piece(p, k);
    return (piece_t){(char *)gathered.source, gathered.target, gathered.length};
}

static void plan_run(const plan_t *plan, stream_fn stream) {
    if (plan->total_bytes < STREAM_MIN_BYTES)
        stream = stream_plain;
    piece_t piece = plan->pieces ? plan->piece(plan, 0) : (piece_t){0};
    for (uint64_t k = 0; k < plan->pieces; k++) {
        piece_t next = k + 1 < plan->pieces ? plan->piece(plan, k + 1) : (piece_t){0};
        bool adjacent = next.source == piece.source + piece.length; /* the hardware is on its way */
        if (piece.length < STREAM_MIN_PIECE)
            memcpy(piece.target, piece.source, piece.length);
        else
            stream(piece.target, piece.source, piece.length, adjacent ? NULL : next.source);
        piece = next;
    }
    stream_end();
}

static PyObject *plan_run_without_gil(const plan_t *plan, const isa_t *isa) {
    Py_BEGIN_ALLOW_THREADS
    plan_run(plan, isa->stream);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- arguments ------------------------------------------------------------------------------------------ */

/* A borrowed 1-D, contiguous, aligned array of native 8-byte integers: 'Q' unsigned, 'q' signed. */
static bool array_get(PyObject *object, const char *name, char kind, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_RECORDS_RO) < 0)
        return false;
    const char *format = view->format ? view->format : "B";
    if (strlen(format) != 1 || !strchr(kind == 'Q' ? "QL" : "ql", *format))
        PyErr_Format(PyExc_TypeError, "%s: want format %c, got %s", name, kind, format);
    else if (view->ndim != 1)
        PyErr_Format(PyExc_ValueError, "%s: want 1 dimension, got %d", name, view->ndim);
    else if (view->shape[0] > 1 && view->strides[0] != 8)
        PyErr_Format(PyExc_ValueError, "%s: not contiguous", name);
    else if (view->shape[0] && (uintptr_t)view->buf % 8) /* nowhere is a fine place for nothing */
        PyErr_Format(PyExc_ValueError, "%s: not aligned", name);
    else
        return true;
    PyBuffer_Release(view);
    return false;
}

/* An int in [least, 2**63]. */
static bool number_get(PyObject *object, const char *name, uint64_t least, uint64_t *value) {
    PyObject *index = PyNumber_Index(object);
    if (!index)
        return false;
    *value = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return false;
        PyErr_Clear();
        *value = UINT64_MAX;
    }
    if (*value >= least && *value <= ADDRESS_END)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: want %llu to 2**63", name, (unsigned long long)least);
    return false;
}

/* Is [address, address + length) a range that a process can have? */
static bool range_fits(uint64_t address, uint64_t length) {
    return address && address <= ADDRESS_END && length <= ADDRESS_END - address;
}

static bool copyv_check(plan_t *p) {
    for (uint64_t k = 0; k < p->pieces; k++) {
        uint64_t length = p->lengths[k];
        if (!length)
            continue;
        if (!range_fits(p->targets[k], length) || !range_fits(p->sources[k], length)) {
            PyErr_Format(PyExc_ValueError, "piece %llu: outside of the address space", (unsigned long long)k);
            return false;
        }
        if (length > ADDRESS_END - p->total_bytes) {
            PyErr_SetString(PyExc_ValueError, "lengths: more than 2**63 bytes in all");
            return false;
        }
        p->total_bytes += length;
    }
    return true;
}

static bool paged_check(plan_t *p) {
    if (p->stride_bytes < p->block_bytes || p->layer_stride_bytes < p->block_bytes) {
        PyErr_SetString(PyExc_ValueError, "stride_bytes and layer_stride_bytes: less than block_bytes");
        return false;
    }
    if (__builtin_mul_overflow(p->layer_count, p->block_count, &p->pieces) ||
        __builtin_mul_overflow(p->pieces, p->block_bytes, &p->total_bytes) || p->total_bytes > ADDRESS_END) {
        PyErr_SetString(PyExc_ValueError, "bases and blocks: more than 2**63 bytes in all");
        return false;
    }
    if (!p->pieces)
        return true;
    uint64_t last_block = 0, paged_bytes, packed_bytes;
    for (uint64_t i = 0; i < p->block_count; i++) {
        if (p->blocks[i] < 0) {
            PyErr_Format(PyExc_ValueError, "blocks[%llu]: negative", (unsigned long long)i);
            return false;
        }
        last_block = (uint64_t)p->blocks[i] > last_block ? (uint64_t)p->blocks[i] : last_block;
    }
    if (__builtin_mul_overflow(last_block, p->stride_bytes, &paged_bytes) ||
        __builtin_add_overflow(paged_bytes, p->block_bytes, &paged_bytes) ||
        __builtin_mul_overflow(p->layer_count - 1, p->layer_stride_bytes, &packed_bytes) ||
        __builtin_add_overflow(packed_bytes, p->block_bytes, &packed_bytes))
        paged_bytes = packed_bytes = UINT64_MAX;
    for (uint64_t layer = 0; layer < p->layer_count; layer++)
        if (!range_fits(p->bases[layer], paged_bytes)) {
            PyErr_Format(PyExc_ValueError, "bases[%llu]: outside of the address space", (unsigned long long)layer);
            return false;
        }
    for (uint64_t i = 0; i < p->block_count; i++)
        if (!range_fits(p->places[i], packed_bytes)) {
            PyErr_Format(PyExc_ValueError, "places[%llu]: outside of the address space", (unsigned long long)i);
            return false;
        }
    return true;
}

/* ---- Python --------------------------------------------------------------------------------------------- */

static PyObject *copyv(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"targets", "sources", "lengths", "isa", NULL};
    PyObject *objects[3], *result = NULL;
    Py_buffer views[3];
    const char *isa_name = NULL;
    int held = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$z:copyv", names, &objects[0], &objects[1],
                                     &objects[2], &isa_name))
        return NULL;
    const isa_t *isa = isa_find(module, isa_name);
    if (!isa)
        return NULL;
    for (; held < 3; held++)
        if (!array_get(objects[held], names[held], 'Q', &views[held]))
            goto done;
    if (views[0].shape[0] != views[1].shape[0] || views[0].shape[0] != views[2].shape[0]) {
        PyErr_SetString(PyExc_ValueError, "targets, sources and lengths: not equally long");
        goto done;
    }
    plan_t plan = {.piece = copyv_piece, .pieces = (uint64_t)views[0].shape[0],
                   .targets = views[0].buf, .sources = views[1].buf, .lengths = views[2].buf};
    if (copyv_check(&plan))
        result = plan_run_without_gil(&plan, isa);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *paged(PyObject *module, PyObject *args, PyObject *kwargs, plan_t plan) {
    static char *names[] = {"bases",        "blocks",             "places", "block_bytes",
                            "stride_bytes", "layer_stride_bytes", "isa",    NULL};
    static const char kinds[] = {'Q', 'q', 'Q'};
    PyObject *objects[3], *numbers[3] = {NULL, NULL, NULL}, *result = NULL;
    Py_buffer views[3];
    const char *isa_name = NULL;
    int held = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$OOOz", names, &objects[0], &objects[1], &objects[2],
                                     &numbers[0], &numbers[1], &numbers[2], &isa_name))
        return NULL;
    for (int i = 0; i < 3; i++)
        if (!numbers[i])
            return PyErr_Format(PyExc_TypeError, "%s: missing", names[3 + i]);
    const isa_t *isa = isa_find(module, isa_name);
    if (!isa || !number_get(numbers[0], names[3], 1, &plan.block_bytes) ||
        !number_get(numbers[1], names[4], 1, &plan.stride_bytes) ||
        !number_get(numbers[2], names[5], 1, &plan.layer_stride_bytes))
        return NULL;
    for (; held < 3; held++)
        if (!array_get(objects[held], names[held], kinds[held], &views[held]))
            goto done;
    if (views[1].shape[0] != views[2].shape[0]) {
        PyErr_SetString(PyExc_ValueError, "blocks and places: not equally long");
        goto done;
    }
    plan.bases = views[0].buf, plan.blocks = views[1].buf, plan.places = views[2].buf;
    plan.layer_count = (uint64_t)views[0].shape[0], plan.block_count = (uint64_t)views[1].shape[0];
    if (paged_check(&plan))
        result = plan_run_without_gil(&plan, isa);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *gather(PyObject *module, PyObject *args, PyObject *kwargs) {
    return paged(module, args, kwargs, (plan_t){.piece = gather_piece});
}

static PyObject *scatter(PyObject *module, PyObject *args, PyObject *kwargs) {
    return paged(module, args, kwargs, (plan_t){.piece = scatter_piece});
}

/* Writes a byte of each page without changing it, even while others write there. */
static void touch_pages(uint64_t start, uint64_t end, uint64_t page_bytes) {
    for (uint64_t page = start; page < end; page += page_bytes)
        __atomic_fetch_or((volatile unsigned char *)page, 0, __ATOMIC_RELAXED);
}

/* populate=False is the way of kernels before 5.14, so that it can be tested on newer ones. */
static PyObject *touch(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    static char *names[] = {"address", "length", "populate", NULL};
    PyObject *objects[2];
    uint64_t address, length;
    int populate = 1, failed = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:touch", names, &objects[0], &objects[1],
                                     &populate) ||
        !number_get(objects[0], names[0], 0, &address) || !number_get(objects[1], names[1], 0, &length))
        return NULL;
    if (!length)
        Py_RETURN_NONE;
    if (!range_fits(address, length)) {
        PyErr_SetString(PyExc_ValueError, "touch: outside of the address space");
        return NULL;
    }
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = address / page_bytes * page_bytes;
    uint64_t end = (address + length + page_bytes - 1) / page_bytes * page_bytes;
    Py_BEGIN_ALLOW_THREADS
    /* Of no bytes it succeeds exactly where the kernel has it.  There a failure means that these pages cannot
     * be had, and touching them one by one would end the process with SIGBUS or SIGSEGV. */
    if (populate && madvise(NULL, 0, MADV_POPULATE_WRITE) == 0)
        failed = madvise((void *)start, end - start, MADV_POPULATE_WRITE);
    else
        touch_pages(start, end, page_bytes);
    Py_END_ALLOW_THREADS
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

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

static PyMethodDef METHODS[] = {
    {"copyv", (PyCFunction)(void (*)(void))copyv, METH_VARARGS | METH_KEYWORDS, NULL},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_VARARGS | METH_KEYWORDS, NULL},
    {"scatter", (PyCFunction)(void (*)(void))scatter, METH_VARARGS | METH_KEYWORDS, NULL},
    {"touch", (PyCFunction)(void (*)(void))touch, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._copy",
    .m_doc = "Copies between addresses with the GIL released; the contracts are in headwater._kernels.",
    .m_size = sizeof(state_t),
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__copy(void) {
    return PyModuleDef_Init(&MODULE);
}
