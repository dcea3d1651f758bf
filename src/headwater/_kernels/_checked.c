/* headwater._kernels._checked: a copy that computes the xxh3-64 of what it writes, in one pass over memory.
 *
 * The bytes that are hashed are the very ones that were stored: every line is loaded once, into registers that feed
 * both.  So a source that somebody changes meanwhile cannot give a target that does not match its checksum.  Only the
 * end is different, which xxh3 looks at twice: there the target is read back.
 *
 * The hash is XXH3_64bits without a seed, for inputs of more than 240 bytes (Yann Collet's specification).
 *
 * Plain CPython limited API of 3.11; the module keeps nothing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if UINTPTR_MAX != UINT64_MAX || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "addresses are 64 bits wide here, and numbers little-endian"
#endif

#define ADDRESS_END (UINT64_C(1) << 63)
#define LEAST_BYTES 241                        /* shorter inputs have other formulas */
#define STREAM_MIN_BYTES (UINT64_C(256) << 10) /* less may be read again at once: it goes through the cache */

#define AHEAD 4096 /* bytes that are fetched early: hashing keeps the core too busy to run ahead by itself */
#define STRIPE 64
#define STRIPES 16 /* of a block: each uses the secret 8 bytes further on */
#define BLOCK (STRIPE * STRIPES)

#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef struct {
    uint64_t lane[8];
} __attribute__((aligned(64))) state_t;

static const state_t START = {{
    UINT64_C(0xC2B2AE3D), PRIME64_1, UINT64_C(0xC2B2AE3D27D4EB4F), UINT64_C(0x165667B19E3779F9),
    UINT64_C(0x85EBCA77C2B2AE63), UINT64_C(0x85EBCA77), UINT64_C(0x27D4EB2F165667C5), PRIME32_1,
}};

static uint64_t word(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* ---- one stripe, one block's end, and what becomes of the state ------------------------------------------- */

static void stripe_plain(state_t *state, const char *bytes, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t data = word(bytes + 8 * i), key = data ^ word(secret + 8 * i);
        state->lane[i ^ 1] += data;
        state->lane[i] += (key & UINT32_MAX) * (key >> 32);
    }
}

static void scramble(state_t *state) {
    for (int i = 0; i < 8; i++) {
        uint64_t lane = state->lane[i];
        state->lane[i] = (lane ^ lane >> 47 ^ word(SECRET + sizeof SECRET - STRIPE + 8 * i)) * PRIME32_1;
    }
}

static uint64_t finish(state_t *state, const char *last, uint64_t length) {
    stripe_plain(state, last, SECRET + sizeof SECRET - STRIPE - 7);
    uint64_t sum = length * PRIME64_1;
    for (int i = 0; i < 8; i += 2) {
        unsigned __int128 product = (unsigned __int128)(state->lane[i] ^ word(SECRET + 11 + 8 * i)) *
                                    (state->lane[i + 1] ^ word(SECRET + 11 + 8 * i + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum = (sum ^ sum >> 37) * UINT64_C(0x165667919E3779F9);
    return sum ^ sum >> 32;
}

/* ---- `stripes` stripes of one block, copied and hashed ---------------------------------------------------- */

typedef void (*block_fn)(state_t *state, char *target, const char *source, int stripes);

static void block_plain(state_t *state, char *target, const char *source, int stripes) {
    for (int n = 0; n < stripes; n++) {
        char line[STRIPE];
        memcpy(line, source + n * STRIPE, STRIPE);
        __asm__ volatile("" : : "r"(line) : "memory"); /* what is in it now, not the source once more */
        memcpy(target + n * STRIPE, line, STRIPE);
        stripe_plain(state, line, SECRET + 8 * n);
    }
}

#if defined(__x86_64__)

#define DEFINE_BLOCK(NAME, STORE)                                                                           \
    __attribute__((target("avx2"))) static void NAME(state_t *state, char *target, const char *source,       \
                                                     int stripes) {                                         \
        __m256i a[2] = {_mm256_load_si256((const __m256i *)state->lane),                                     \
                        _mm256_load_si256((const __m256i *)state->lane + 1)};                                \
        for (int n = 0; n < stripes; n++) {                                                                 \
            _mm_prefetch(source + n * STRIPE + AHEAD, _MM_HINT_T0);                                         \
            _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {                                           \
                __m256i data = _mm256_loadu_si256((const __m256i *)(source + n * STRIPE) + i);              \
                __asm__("" : "+x"(data)); /* loaded once, for both */                                       \
                STORE((__m256i *)(target + n * STRIPE) + i, data);                                          \
                __m256i key = _mm256_loadu_si256((const __m256i *)(SECRET + 8 * n) + i);                    \
                key = _mm256_xor_si256(data, key);                                                          \
                __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));                        \
                __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));                      \
                a[i] = _mm256_add_epi64(product, _mm256_add_epi64(a[i], swapped));                          \
            }                                                                                               \
        }                                                                                                   \
        _mm256_store_si256((__m256i *)state->lane, a[0]);                                                    \
        _mm256_store_si256((__m256i *)state->lane + 1, a[1]);                                                \
    }

DEFINE_BLOCK(block_avx2, _mm256_storeu_si256)
DEFINE_BLOCK(block_avx2_stream, _mm256_stream_si256)

static bool has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

/* Non-temporal stores take whole aligned vectors; see _stream.h for what they are good for. */
static block_fn block_for(const char *target, uint64_t length, bool plain) {
    if (plain || !has_avx2())
        return block_plain;
    return length >= STREAM_MIN_BYTES && (uintptr_t)target % 32 == 0 ? block_avx2_stream : block_avx2;
}

static void stores_end(void) {
    _mm_sfence();
}

#else

static block_fn block_for(const char *target, uint64_t length, bool plain) {
    (void)target, (void)length, (void)plain;
    return block_plain;
}

static void stores_end(void) {}

#endif

static uint64_t copy(char *target, const char *source, uint64_t length, bool plain) {
    block_fn block = block_for(target, length, plain);
    state_t state = START;
    uint64_t blocks = (length - 1) / BLOCK, done = blocks * BLOCK;
    for (uint64_t n = 0; n < blocks; n++) {
        block(&state, target + n * BLOCK, source + n * BLOCK, STRIPES);
        scramble(&state);
    }
    int stripes = (int)((length - 1 - done) / STRIPE);
    block(&state, target + done, source + done, stripes);
    done += (uint64_t)stripes * STRIPE;
    memcpy(target + done, source + done, length - done);
    stores_end(); /* before the end is read back, and before anybody is told */
    return finish(&state, target + length - STRIPE, length);
}

/* ---- Python ----------------------------------------------------------------------------------------------- */

static bool range_fits(unsigned long long address, unsigned long long length) {
    return address && address <= ADDRESS_END && length <= ADDRESS_END - address;
}

static PyObject *copy_checked(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    static char *names[] = {"target", "source", "length", "plain", NULL};
    PyObject *objects[3];
    unsigned long long numbers[3], sum;
    int plain = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$p:copy_checked", names, &objects[0], &objects[1],
                                     &objects[2], &plain))
        return NULL;
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(objects[i]);
        if (numbers[i] == (unsigned long long)-1 && PyErr_Occurred())
            return NULL;
    }
    if (numbers[2] < LEAST_BYTES)
        return PyErr_Format(PyExc_ValueError, "length: want at least %d", LEAST_BYTES);
    if (!range_fits(numbers[0], numbers[2]) || !range_fits(numbers[1], numbers[2]))
        return PyErr_Format(PyExc_ValueError, "target and source: outside of the address space");
    Py_BEGIN_ALLOW_THREADS
    sum = copy((char *)numbers[0], (const char *)numbers[1], numbers[2], plain);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(sum);
}

static PyMethodDef METHODS[] = {
    {"copy_checked", (PyCFunction)(void (*)(void))copy_checked, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater._kernels._checked",
    .m_doc = "A copy that checks what it writes; the contract is in headwater._kernels.checked.",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__checked(void) {
    return PyModuleDef_Init(&MODULE);
}
