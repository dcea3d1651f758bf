/* headwater._kernels._keys: the chain of SHA-256 digests that a prompt's keys are cut from, in one call; and the ids
 * that it is made from, out of a request's JSON.
 *
 *   digest_i = SHA-256(digest_{i-1} || chunk i of the tokens, each 4 bytes, little-endian)
 *
 * What this does not do itself (ids that are no 32-bit numbers, other containers than lists, tuples and arrays of "I",
 * a first digest of another size, what would take longer here) it answers with None, and raises nothing: the fallback
 * then does it, or says what is wrong.  Byte order: tokens are written little-endian and SHA-256's words big-endian, by bytes or by an explicit swap,
 * whatever the machine's own order is.
 *
 * Plain CPython limited API of 3.11.  All that is kept is in the module state: the best instruction set here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define BLOCK 64
#define DIGEST 32
#define TOKEN 4
/* Of tokens, in bytes.  To have the GIL back may take another thread's whole turn, 5 ms: for less than about a
 * millisecond of hashing it is not given away. */
#define RELEASE_MIN_BYTES (1 << 20)
/* Without SHA instructions.  What the fallback takes longer for is the call for each chunk; hashing itself is in
 * assembly there, for many machines. */
#define PLAIN_MOST_TOKENS 64

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* ---- SHA-256's compression of whole blocks (FIPS 180-4, 6.2.2) --------------------------------------------- */

typedef void (*compress_fn)(uint32_t state[8], const uint8_t *bytes, size_t blocks);

static uint32_t turned(uint32_t value, int bits) {
    return value >> bits | value << (32 - bits);
}

static void compress_plain(uint32_t state[8], const uint8_t *bytes, size_t blocks) {
    for (; blocks; blocks--, bytes += BLOCK) {
        uint32_t w[64];
        for (int t = 0; t < 16; t++) {
            const uint8_t *at = bytes + 4 * t;
            w[t] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        }
        for (int t = 16; t < 64; t++) {
            uint32_t s0 = turned(w[t - 15], 7) ^ turned(w[t - 15], 18) ^ w[t - 15] >> 3;
            uint32_t s1 = turned(w[t - 2], 17) ^ turned(w[t - 2], 19) ^ w[t - 2] >> 10;
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; t++) {
            uint32_t one = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + K[t] + w[t];
            uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if defined(__x86_64__)

/* The instructions want the state as (A B E F) and (C D G H), each from its highest word down. */
__attribute__((target("sha,sse4.1"))) static void compress_sha(uint32_t state[8], const uint8_t *bytes,
                                                                size_t blocks) {
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state + 1), 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; blocks; blocks--, bytes += BLOCK) {
        __m128i abef_before = abef, cdgh_before = cdgh, w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)bytes + i), swap);
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
            __m128i *oldest = &w[i & 3], last = w[(i + 3) & 3];
            __m128i sum = _mm_add_epi32(*oldest, _mm_load_si128((const __m128i *)K + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum); /* two rounds; the two halves change roles */
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
            __m128i seventh = _mm_alignr_epi8(last, w[(i + 2) & 3], 4);
            __m128i next = _mm_add_epi32(_mm_sha256msg1_epu32(*oldest, w[(i + 1) & 3]), seventh);
            *oldest = _mm_sha256msg2_epu32(next, last);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)state + 1, _mm_alignr_epi8(high, low, 8));
}

static bool has_sha(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1 << 9) || !(c & 1 << 19)) /* SSSE3, SSE4.1 */
        return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1 << 29;
}

#endif

typedef struct {
    compress_fn best; /* asked once: a virtual machine's cpuid takes tens of microseconds */
    const char *isa;
} state_t;

/* The compression called `name`, the best for NULL; NULL and ValueError for one that is not here. */
static compress_fn compress_find(PyObject *module, const char *name) {
    const state_t *state = PyModule_GetState(module);
    if (!name || !strcmp(name, state->isa))
        return state->best;
    if (!strcmp(name, "plain"))
        return compress_plain;
    PyErr_Format(PyExc_ValueError, "isa %s is not available here", name);
    return NULL;
}

/* ---- whole messages, and the chain ------------------------------------------------------------------------- */

static void hash(compress_fn compress, const uint8_t *bytes, size_t length, uint8_t digest[DIGEST]) {
    uint32_t state[8];
    uint8_t tail[2 * BLOCK] = {0};
    size_t whole = length / BLOCK, left = length % BLOCK, blocks = left < BLOCK - 8 ? 1 : 2;
    memcpy(state, START, sizeof state);
    compress(state, bytes, whole);
    memcpy(tail, bytes + whole * BLOCK, left);
    tail[left] = 0x80;
    for (size_t i = 0; i < 8; i++)
        tail[blocks * BLOCK - 1 - i] = (uint8_t)((uint64_t)length * 8 >> 8 * i);
    compress(state, tail, blocks);
    for (int i = 0; i < DIGEST; i++)
        digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

/* `message` has the first digest, and room for a chunk behind it. */
static void chain_run(compress_fn compress, uint8_t *message, const uint8_t *packed, size_t chunk_bytes, size_t chunks,
                      uint8_t *digests) {
    for (size_t i = 0; i < chunks; i++) {
        memcpy(message + DIGEST, packed + i * chunk_bytes, chunk_bytes);
        hash(compress, message, DIGEST + chunk_bytes, digests + i * DIGEST);
        memcpy(message, digests + i * DIGEST, DIGEST);
    }
}

static uint32_t little_endian(uint32_t value) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return value;
#else
    return __builtin_bswap32(value);
#endif
}

/* ---- Python ------------------------------------------------------------------------------------------------ */

/* The tokens as they are hashed; NULL, without an exception but for want of memory, if that is the fallback's. */
static uint32_t *pack(PyObject *tokens, size_t *count) {
    bool is_list = PyList_Check(tokens);
    Py_buffer view = {0};
    if (is_list || PyTuple_Check(tokens)) {
        *count = (size_t)(is_list ? PyList_Size(tokens) : PyTuple_Size(tokens));
    } else {
        if (PyObject_GetBuffer(tokens, &view, PyBUF_ND | PyBUF_FORMAT) < 0) {
            PyErr_Clear();
            return NULL;
        }
        if (view.ndim != 1 || !view.format || strcmp(view.format, "I") || view.itemsize != TOKEN) {
            PyBuffer_Release(&view);
            return NULL;
        }
        *count = (size_t)view.shape[0];
    }
    uint32_t *packed = PyMem_Malloc(*count ? *count * TOKEN : 1);
    if (!packed) {
        PyErr_NoMemory();
    } else if (view.obj) {
        memcpy(packed, view.buf, *count * TOKEN);
        for (size_t i = 0; i < *count; i++)
            packed[i] = little_endian(packed[i]);
    } else {
        for (size_t i = 0; i < *count; i++) {
            PyObject *it = is_list ? PyList_GetItem(tokens, (Py_ssize_t)i) : PyTuple_GetItem(tokens, (Py_ssize_t)i);
            unsigned long value = it ? PyLong_AsUnsignedLong(it) : (unsigned long)-1;
            if (value > UINT32_MAX || (value == UINT32_MAX && PyErr_Occurred())) {
                PyErr_Clear();
                PyMem_Free(packed);
                return NULL;
            }
            packed[i] = little_endian((uint32_t)value);
        }
    }
    PyBuffer_Release(&view);
    return packed;
}

static PyObject *list_of(const uint8_t *digests, size_t count, Py_ssize_t kept_bytes) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *it = PyBytes_FromStringAndSize((const char *)digests + i * DIGEST, kept_bytes);
        if (!it || PyList_SetItem(list, (Py_ssize_t)i, it) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *chain(PyObject *module, PyObject *args) {
    PyObject *first, *tokens, *chunk;
    Py_ssize_t kept_bytes;
    const char *isa = NULL;
    if (!PyArg_ParseTuple(args, "OOOn|z:chain", &first, &tokens, &chunk, &kept_bytes, &isa))
        return NULL;
    compress_fn compress = compress_find(module, isa);
    if (!compress)
        return NULL;
    if (kept_bytes < 1 || kept_bytes > DIGEST)
        return PyErr_Format(PyExc_ValueError, "kept_bytes: want 1 to %d", DIGEST);
    Py_ssize_t chunk_tokens = PyLong_AsSsize_t(chunk); /* -1 for what is no int */
    bool is_slow = compress == compress_plain && chunk_tokens > PLAIN_MOST_TOKENS;
    if (chunk_tokens < 1 || is_slow || PyBytes_Size(first) != DIGEST) {
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    size_t count = 0;
    uint32_t *packed = pack(tokens, &count);
    if (!packed)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    size_t chunks = count / (size_t)chunk_tokens;
    size_t chunk_bytes = chunks ? (size_t)chunk_tokens * TOKEN : 0; /* no more than there are */
    uint8_t *room = PyMem_Malloc(DIGEST + chunk_bytes + chunks * DIGEST);
    PyObject *list = NULL;
    if (room) {
        uint8_t *digests = room + DIGEST + chunk_bytes;
        memcpy(room, PyBytes_AsString(first), DIGEST);
        if (count >= RELEASE_MIN_BYTES / TOKEN) {
            Py_BEGIN_ALLOW_THREADS
            chain_run(compress, room, (const uint8_t *)packed, chunk_bytes, chunks, digests);
            Py_END_ALLOW_THREADS
        } else {
            chain_run(compress, room, (const uint8_t *)packed, chunk_bytes, chunks, digests);
        }
        list = list_of(digests, chunks, kept_bytes);
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(room);
    PyMem_Free(packed);
    return list;
}

/* The ids of a list as they are in an array of "I"; None if anything else than ints of 32 bits is among them. */
static PyObject *exact(PyObject *module, PyObject *ids) {
    (void)module;
    Py_ssize_t count = PyList_Size(ids);
    uint32_t *packed = count < 0 ? NULL : PyMem_Malloc(count ? (size_t)count * TOKEN : 1);
    if (!packed)
        return count < 0 ? NULL : PyErr_NoMemory();
    bool is_good = true;
    for (Py_ssize_t i = 0; i < count && is_good; i++) {
        PyObject *it = PyList_GetItem(ids, i);
        bool is_int = it && PyLong_CheckExact(it);
        unsigned long value = is_int ? PyLong_AsUnsignedLong(it) : 0;
        is_good = is_int && value <= UINT32_MAX && !(value == (unsigned long)-1 && PyErr_Occurred());
        packed[i] = (uint32_t)value;
    }
    PyErr_Clear();
    PyObject *bytes =
        is_good ? PyBytes_FromStringAndSize((const char *)packed, count * TOKEN) : Py_NewRef(Py_None);
    PyMem_Free(packed);
    return bytes;
}

/* ---- ids as JSON writes them ------------------------------------------------------------------------------- */

static const uint8_t *blanks(const uint8_t *at, const uint8_t *end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
        at++;
    return at;
}

/* Up to seven digits and what ends them, in eight bytes: without a branch for each digit, which nobody can predict as
 * ids are of different lengths. How many digits these are; 0 if that cannot be told from eight bytes. */
static int digits_short(const uint8_t *at, uint32_t *value) {
    uint64_t eight;
    memcpy(&eight, at, sizeof eight);
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    eight = __builtin_bswap64(eight);
#endif
    /* The high bit of each byte that is no digit; above the first of them carries may say so of others too. */
    uint64_t low = eight ^ 0x3030303030303030;
    uint64_t others = (low | (low + 0x7676767676767676)) & 0x8080808080808080;
    if (!others)
        return 0;
    int digits = __builtin_ctzll(others) / 8;
    if (!digits)
        return 0;
    low <<= 64 - 8 * digits; /* the last digit is in the highest byte, and noughts are before the first */
    low = low * (1 + (10 << 8)) >> 8;
    low = (low & 0x00FF00FF00FF00FF) * (1 + (100 << 16)) >> 16;
    *value = (uint32_t)((low & 0x0000FFFF0000FFFF) * (1 + (10000ULL << 32)) >> 32);
    return digits;
}

/* Behind a number of 32 bits as JSON writes it; NULL if there is none. */
static const uint8_t *read_id(const uint8_t *at, const uint8_t *end, uint32_t *value) {
    if (end - at >= 8) {
        int digits = digits_short(at, value);
        if (digits)
            return *at == '0' && digits > 1 ? NULL : at + digits;
    }
    const uint8_t *first = at;
    uint64_t sum = 0;
    for (; at < end && *at >= '0' && *at <= '9' && sum <= UINT32_MAX; at++)
        sum = sum * 10 + (*at - '0');
    if (at == first || sum > UINT32_MAX || (*first == '0' && at - first > 1))
        return NULL;
    *value = (uint32_t)sum;
    return at;
}

/* How many ids the text is an array of; -1 if it is none, or one of more than `room` ids. */
static Py_ssize_t read_array(const uint8_t *at, const uint8_t *end, uint32_t *ids, Py_ssize_t room) {
    at = blanks(at, end);
    if (at == end || *at++ != '[')
        return -1;
    at = blanks(at, end);
    Py_ssize_t count = 0;
    bool is_over = at < end && *at == ']';
    while (!is_over) {
        if (count == room || !(at = read_id(at, end, ids + count)))
            return -1;
        count++;
        at = blanks(at, end);
        if (at == end || (*at != ',' && *at != ']'))
            return -1;
        is_over = *at == ']';
        if (!is_over)
            at = blanks(at + 1, end);
    }
    return blanks(at + 1, end) == end ? count : -1;
}

/* The ids of a JSON array as they are in an array of "I"; None if that is not what the text is, or if it has more
 * than `most`. A number takes two bytes of the text at least, its comma or bracket included. */
static PyObject *read_ids(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer text;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "y*n:read_ids", &text, &most))
        return NULL;
    Py_ssize_t room = most < text.len / 2 ? most : text.len / 2, count = -1;
    uint32_t *ids = room < 0 ? NULL : PyMem_Malloc(room ? (size_t)room * TOKEN : 1);
    if (ids)
        count = read_array(text.buf, (const uint8_t *)text.buf + text.len, ids, room);
    PyBuffer_Release(&text);
    if (!ids && room >= 0)
        return PyErr_NoMemory();
    PyObject *bytes =
        count < 0 ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize((const char *)ids, count * TOKEN);
    PyMem_Free(ids);
    return bytes;
}

/* For tests: that what the chain is made with is SHA-256. */
static PyObject *sha256(PyObject *module, PyObject *args) {
    const char *bytes, *isa = NULL;
    Py_ssize_t length;
    uint8_t digest[DIGEST];
    if (!PyArg_ParseTuple(args, "y#|z:sha256", &bytes, &length, &isa))
        return NULL;
    compress_fn compress = compress_find(module, isa);
    if (!compress)
        return NULL;
    hash(compress, (const uint8_t *)bytes, (size_t)length, digest);
    return PyBytes_FromStringAndSize((const char *)digest, DIGEST);
}

static int module_exec(PyObject *module) {
    state_t *state = PyModule_GetState(module);
    state->best = compress_plain;
    state->isa = "plain";
#if defined(__x86_64__)
    if (has_sha()) {
        state->best = compress_sha;
        state->isa = "sha";
    }
#endif
    PyObject *isas = state->best == compress_plain ? Py_BuildValue("(s)", "plain")
                                                   : Py_BuildValue("(ss)", state->isa, "plain");
    int failed = !isas || PyModule_AddObjectRef(module, "ISAS", isas) < 0;
    Py_XDECREF(isas);
    return failed ? -1 : 0;
}

static PyMethodDef METHODS[] = {
    {"chain", chain, METH_VARARGS, NULL},
    {"exact", exact, METH_O, NULL},
    {"read_ids", read_ids, METH_VARARGS, NULL},
    {"sha256", sha256, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._keys",
    .m_doc = "A prompt's chained digests; the contract is in headwater._kernels.keys.",
    .m_size = sizeof(state_t),
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__keys(void) {
    return PyModuleDef_Init(&MODULE);
}
