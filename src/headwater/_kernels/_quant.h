/* Symmetric int8 with one scale for each channel of a span of rows, in one pass over memory.
 *
 *   source  [layer][block][run][row][channel]  bfloat16, float16 or float32
 *   scales  [layer][span][run][channel]        float32, span_blocks blocks a span, the last one may have fewer
 *   data    [layer][block][run][row][channel]  int8
 *
 *   scale = greatest |x| / 127, from LEAST_SCALE to MOST_SCALE
 *   q     = round-half-even(x * (1 / scale))
 *   x'    = round-half-even(q * scale)
 *
 * Every step is one IEEE operation in float32, so all instruction sets and the fallback give the same bits; the
 * compiler must not fuse a product into a sum (-ffp-contract=off).  The least scale is the least normal number: its
 * inverse is finite, and a channel of zeros needs no case of its own.  The greatest |x| is found among the bits
 * without sign, which are ordered as the numbers are, infinities and NaNs above all others.
 */
#ifndef HEADWATER_QUANT_H
#define HEADWATER_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TILE 512                  /* channels at a time: the rows of a tile stay in the cache for the second look */
#define LEAST_SCALE 0x1p-126f
#define MOST_SCALE 0x1.020406p121f /* the greatest that 127 times is finite */
#define ROUNDER 12582912.0f       /* 1.5 * 2**23: a sum with it has no bits left for a fraction */

typedef enum { BFLOAT16, FLOAT16, FLOAT32 } element_t;

typedef struct {
    const char *name;
    size_t bytes;
    uint32_t infinity; /* the bits of the least that is not finite */
} element_info_t;

static const element_info_t ELEMENTS[] = {
    [BFLOAT16] = {"bfloat16", 2, 0x7f80},
    [FLOAT16] = {"float16", 2, 0x7c00},
    [FLOAT32] = {"float32", 4, 0x7f800000},
};
#define ELEMENT_COUNT (sizeof ELEMENTS / sizeof *ELEMENTS)

typedef struct {
    element_t element;
    size_t layers, blocks, span_blocks, runs, rows, channels;
    char *source; /* written by dequantise */
    float *scales;
    int8_t *data;
} quant_t;

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- one element ---------------------------------------------------------------------------------------- */

/* Exact. A float16 is widened by giving its bits a float32's exponent that is 112 too small, and 2**112 back. */
INLINE float widen(uint32_t bits, element_t element) {
    if (element == BFLOAT16)
        return of_bits(bits << 16);
    if (element == FLOAT16)
        return of_bits((bits & 0x8000) << 16 | bits_of(of_bits((bits & 0x7fff) << 13) * 0x1p112f));
    return of_bits(bits);
}

/* Of a finite value in range. Below 2**-14 a float16 has a fixed step of 2**-24, as float32 has from 0.5 to 1: the
 * sum with 0.5 rounds to it. */
INLINE uint32_t narrow(float value, element_t element) {
    uint32_t bits = bits_of(value), sign = bits & 0x80000000, size = bits ^ sign;
    if (element == BFLOAT16)
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if (element == FLOAT16) {
        uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3f000000;
        uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
        uint32_t is_small = -(uint32_t)(size < 0x38800000); /* a mask: a branch would keep this out of vectors */
        return sign >> 16 | (small & is_small) | (normal & ~is_small);
    }
    return bits;
}

INLINE float scale_of(uint32_t most_bits, element_t element) {
    float scale = widen(most_bits, element) / 127.0f;
    scale = scale < LEAST_SCALE ? LEAST_SCALE : scale;
    return scale > MOST_SCALE ? MOST_SCALE : scale;
}

/* ---- one row of a tile ---------------------------------------------------------------------------------- */

INLINE void row_most_16(uint16_t *restrict most, const uint16_t *restrict row, size_t count) {
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        uint16_t size = row[i] & 0x7fff;
        most[i] = size > most[i] ? size : most[i];
    }
}

INLINE void row_most_32(uint32_t *restrict most, const uint32_t *restrict row, size_t count) {
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        uint32_t size = row[i] & 0x7fffffff;
        most[i] = size > most[i] ? size : most[i];
    }
}

INLINE void row_quantise(int8_t *restrict data, const char *restrict row, const float *restrict inverse, size_t count,
                         element_t element) {
    const uint16_t *row_16 = (const uint16_t *)row;
    const uint32_t *row_32 = (const uint32_t *)row;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        float value = widen(element == FLOAT32 ? row_32[i] : row_16[i], element);
        data[i] = (int8_t)bits_of(value * inverse[i] + ROUNDER);
    }
}

INLINE void row_dequantise(char *restrict row, const int8_t *restrict data, const float *restrict scale, size_t count,
                           element_t element) {
    uint16_t *row_16 = (uint16_t *)row;
    uint32_t *row_32 = (uint32_t *)row;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        int q = data[i] < -127 ? -127 : data[i]; /* -128 is never written; what was would stay in range */
        uint32_t bits = narrow((float)q * scale[i], element);
        if (element == FLOAT32)
            row_32[i] = bits;
        else
            row_16[i] = (uint16_t)bits;
    }
}

/* ---- tiles: some channels of one run in one span of blocks ---------------------------------------------- */

typedef struct {
    size_t start, stride, blocks, count; /* first element, from block to block, blocks, channels */
    float *scales;
} tile_t;

INLINE bool tile_quantise(const quant_t *q, tile_t tile, element_t element) {
    size_t bytes = element == FLOAT32 ? 4 : 2;
    union {
        uint16_t u16[TILE];
        uint32_t u32[TILE];
    } most;
    float inverse[TILE];
    memset(&most, 0, sizeof most);
    for (size_t b = 0; b < tile.blocks; b++)
        for (size_t r = 0; r < q->rows; r++) {
            const char *row = q->source + (tile.start + b * tile.stride + r * q->channels) * bytes;
            if (element == FLOAT32)
                row_most_32(most.u32, (const uint32_t *)row, tile.count);
            else
                row_most_16(most.u16, (const uint16_t *)row, tile.count);
        }
    uint32_t greatest = 0;
    for (size_t i = 0; i < tile.count; i++) {
        uint32_t bits = element == FLOAT32 ? most.u32[i] : most.u16[i];
        greatest = bits > greatest ? bits : greatest;
        tile.scales[i] = scale_of(bits, element);
        inverse[i] = 1.0f / tile.scales[i];
    }
    if (greatest >= ELEMENTS[element].infinity)
        return false;
    for (size_t b = 0; b < tile.blocks; b++)
        for (size_t r = 0; r < q->rows; r++) {
            size_t first = tile.start + b * tile.stride + r * q->channels;
            row_quantise(q->data + first, q->source + first * bytes, inverse, tile.count, element);
        }
    return true;
}

INLINE bool tile_dequantise(const quant_t *q, tile_t tile, element_t element) {
    size_t bytes = element == FLOAT32 ? 4 : 2;
    uint32_t least = bits_of(LEAST_SCALE), most = bits_of(scale_of(ELEMENTS[element].infinity - 1, element));
    bool possible = true;
    for (size_t i = 0; i < tile.count; i++) {
        uint32_t bits = bits_of(tile.scales[i]);
        possible &= bits >= least && bits <= most;
    }
    if (!possible)
        return false;
    for (size_t b = 0; b < tile.blocks; b++)
        for (size_t r = 0; r < q->rows; r++) {
            size_t first = tile.start + b * tile.stride + r * q->channels;
            row_dequantise(q->source + first * bytes, q->data + first, tile.scales, tile.count, element);
        }
    return true;
}

/* ---- all tiles; false as soon as one says so ------------------------------------------------------------ */

INLINE bool quant_run(const quant_t *q, bool (*tile_run)(const quant_t *, tile_t, element_t), element_t element) {
    size_t stride = q->runs * q->rows * q->channels;
    float *scales = q->scales;
    for (size_t layer = 0; layer < q->layers; layer++)
        for (size_t block = 0; block < q->blocks; block += q->span_blocks)
            for (size_t run = 0; run < q->runs; run++) {
                size_t left = q->blocks - block, start = (layer * q->blocks + block) * stride;
                start += run * q->rows * q->channels;
                for (size_t channel = 0; channel < q->channels; channel += TILE) {
                    size_t count = q->channels - channel < TILE ? q->channels - channel : TILE;
                    tile_t tile = {start + channel, stride, left < q->span_blocks ? left : q->span_blocks, count, scales};
                    if (!tile_run(q, tile, element))
                        return false;
                    scales += count;
                }
            }
    return true;
}

INLINE bool quantise_all(const quant_t *q) {
    switch (q->element) {
    case BFLOAT16:
        return quant_run(q, tile_quantise, BFLOAT16);
    case FLOAT16:
        return quant_run(q, tile_quantise, FLOAT16);
    default:
        return quant_run(q, tile_quantise, FLOAT32);
    }
}

INLINE bool dequantise_all(const quant_t *q) {
    switch (q->element) {
    case BFLOAT16:
        return quant_run(q, tile_dequantise, BFLOAT16);
    case FLOAT16:
        return quant_run(q, tile_dequantise, FLOAT16);
    default:
        return quant_run(q, tile_dequantise, FLOAT32);
    }
}

#endif
