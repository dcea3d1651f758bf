/* Byte planes: byte b of all elements, one after another, for b = 0, 1, ...; and back.
 *
 * Compressors find nothing in floats as they lie, but much in their exponents alone.  The loops are plain C that
 * the compiler turns into the vectors of each instruction set.
 */
#ifndef HEADWATER_PLANES_H
#define HEADWATER_PLANES_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

INLINE void split_2(uint8_t *restrict target, const uint8_t *restrict source, size_t count) {
    uint8_t *p0 = target, *p1 = target + count;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        p0[i] = source[2 * i];
        p1[i] = source[2 * i + 1];
    }
}

INLINE void split_4(uint8_t *restrict target, const uint8_t *restrict source, size_t count) {
    uint8_t *p0 = target, *p1 = target + count, *p2 = target + 2 * count, *p3 = target + 3 * count;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        p0[i] = source[4 * i];
        p1[i] = source[4 * i + 1];
        p2[i] = source[4 * i + 2];
        p3[i] = source[4 * i + 3];
    }
}

INLINE void join_2(uint8_t *restrict target, const uint8_t *restrict source, size_t count) {
    const uint8_t *p0 = source, *p1 = source + count;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        target[2 * i] = p0[i];
        target[2 * i + 1] = p1[i];
    }
}

INLINE void join_4(uint8_t *restrict target, const uint8_t *restrict source, size_t count) {
    const uint8_t *p0 = source, *p1 = source + count, *p2 = source + 2 * count, *p3 = source + 3 * count;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        target[4 * i] = p0[i];
        target[4 * i + 1] = p1[i];
        target[4 * i + 2] = p2[i];
        target[4 * i + 3] = p3[i];
    }
}

/* `element_bytes` is 2 or 4. */
INLINE void planes_split(uint8_t *target, const uint8_t *source, size_t count, size_t element_bytes) {
    if (element_bytes == 2)
        split_2(target, source, count);
    else
        split_4(target, source, count);
}

INLINE void planes_join(uint8_t *target, const uint8_t *source, size_t count, size_t element_bytes) {
    if (element_bytes == 2)
        join_2(target, source, count);
    else
        join_4(target, source, count);
}

#endif
