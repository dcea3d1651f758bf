/* How one piece is copied: the instruction sets that this file was compiled for, best first.
 *
 * The streams write with non-temporal stores.  An ordinary store first reads the line that it overwrites, a third
 * of all traffic, and leaves in the cache what this core will not read again.
 */
#ifndef HEADWATER_STREAM_H
#define HEADWATER_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LINE 64
#define NEXT_LEAD 8192 /* bytes left of a piece when the next one is prefetched: two pages */
#define NEXT_LINES 4

/* Copies `length` bytes; `next` is where the caller reads afterwards, or NULL.  Then, after all, stream_end. */
typedef void (*stream_fn)(char *target, const char *source, size_t length, const char *next);

static void stream_plain(char *target, const char *source, size_t length, const char *next) {
    (void)next;
    memcpy(target, source, length);
}

#if defined(__x86_64__)

/* Copies 8 vectors a turn for as long as that leaves at least FLOOR bytes. */
#define COPY_DOWN_TO(FLOOR, VECTOR, LOAD, STORE)                                                          \
    while (left >= (FLOOR) + 8 * sizeof(VECTOR)) {                                                        \
        VECTOR v[8];                                                                                      \
        _Pragma("GCC unroll 8") for (size_t i = 0; i < 8; i++)                                            \
            v[i] = LOAD((const void *)(source + i * sizeof(VECTOR)));                                     \
        _Pragma("GCC unroll 8") for (size_t i = 0; i < 8; i++)                                            \
            STORE((void *)(target + i * sizeof(VECTOR)), v[i]);                                           \
        target += 8 * sizeof(VECTOR), source += 8 * sizeof(VECTOR), left -= 8 * sizeof(VECTOR);           \
    }

/* A stream_fn for one instruction set; the piece is at least a line long.
 *
 * Non-temporal stores pay only in whole aligned lines, so the head up to the first line of the target and the
 * tail after its last are ordinary copies.  Within a piece the hardware prefetcher beats any software prefetch
 * that was tried, but it cannot guess where the next piece begins: so two pages before the end the first lines of
 * `next` are fetched, and with them their address translation. */
#define DEFINE_STREAM(NAME, ISA, VECTOR, LOAD, STORE)                                                     \
    __attribute__((target(ISA))) static void NAME(char *target, const char *source, size_t length,        \
                                                  const char *next) {                                     \
        size_t head = -(uintptr_t)target % LINE, left = length - head;                                    \
        memcpy(target, source, head);                                                                     \
        target += head, source += head;                                                                   \
        COPY_DOWN_TO(NEXT_LEAD, VECTOR, LOAD, STORE)                                                      \
        for (size_t i = 0; next && i < NEXT_LINES; i++)                                                   \
            _mm_prefetch(next + i * LINE, _MM_HINT_T0);                                                   \
        COPY_DOWN_TO(0, VECTOR, LOAD, STORE)                                                              \
        for (; left >= LINE; target += LINE, source += LINE, left -= LINE)                                \
            for (size_t i = 0; i < LINE; i += sizeof(VECTOR))                                             \
                STORE((void *)(target + i), LOAD((const void *)(source + i)));                            \
        memcpy(target, source, left);                                                                     \
    }

DEFINE_STREAM(stream_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
DEFINE_STREAM(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_STREAM(stream_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

/* Non-temporal stores are not ordered with what follows; this puts them before any message that says so. */
static void stream_end(void) {
    _mm_sfence();
}

#else

static void stream_end(void) {}

#endif

typedef struct {
    const char *name;
    stream_fn stream;
} isa_t;

static const isa_t ISAS[] = {
#if defined(__x86_64__)
    {"avx512", stream_avx512},
    {"avx2", stream_avx2},
    {"sse2", stream_sse2},
#endif
    {"plain", stream_plain},
};
#define ISA_COUNT (sizeof ISAS / sizeof *ISAS)

static bool machine_has(const isa_t *isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa->stream == stream_avx512)
        return __builtin_cpu_supports("avx512f");
    if (isa->stream == stream_avx2)
        return __builtin_cpu_supports("avx2");
#endif
    (void)isa;
    return true; /* sse2 is part of x86-64 */
}

#endif
