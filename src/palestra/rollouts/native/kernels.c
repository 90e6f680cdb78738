/* What one decode step computes between its matrix products, each in one pass over memory.
 *
 * Every output row is computed by one thread in one fixed order of operations, so a row's
 * bits do not depend on the other rows or on how many threads there are. Rows may be strided;
 * what is written is contiguous. Sums are fp32 whatever the storage type. Nothing is allocated.
 *
 * The file includes itself once per storage type: fp32, and bf16 as its upper 16 bits.
 */
#ifndef STORED

#include <stdint.h>
#include <string.h>

typedef int64_t i64;

#define MAX_DIM 256
#define BLOCK 32

/* exp by Cody-Waite reduction and a degree 6 polynomial: relative error below 2e-7; nan stays nan. */
static inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t i; float f; } two_n;
    two_n.i = ((int32_t)n + 127) << 23;
    return p * two_n.f;
}

static inline float from_bf16(uint16_t x) {
    union { uint32_t i; float f; } wide;
    wide.i = (uint32_t)x << 16;
    return wide.f;
}

static inline uint16_t to_bf16(float x) { /* to nearest, ties to even; a nan keeps a set bit */
    union { float f; uint32_t i; } wide;
    wide.f = x;
    if (x != x) return (uint16_t)((wide.i >> 16) | 0x40);
    return (uint16_t)((wide.i + 0x7fff + ((wide.i >> 16) & 1)) >> 16);
}

#define STORED float
#define NAME(f) f##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include __FILE__
#undef STORED
#undef NAME
#undef LOAD
#undef STORE
#define STORED uint16_t
#define NAME(f) f##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include __FILE__

#else

/* Attention of one query per head over the first lengths[row] cached positions.
 * q [rows, kv_heads * group, dim] (row stride q_stride), k and v [rows * kv_heads, capacity, dim],
 * out [rows, kv_heads * group, dim], scores [threads, group, capacity]. dim <= MAX_DIM. */
void NAME(attention)(const STORED *q, const STORED *k, const STORED *v, STORED *out, float *scores,
                     const i64 *lengths, i64 rows, i64 kv_heads, i64 group, i64 dim, i64 capacity,
                     i64 q_stride, float scale, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) {
        float *s = scores + (i64)part * group * capacity;
        float query[MAX_DIM];
        i64 pairs = rows * kv_heads;
        for (i64 pair = pairs * part / threads; pair < pairs * (part + 1) / threads; pair++) {
            i64 row = pair / kv_heads, head = pair % kv_heads, length = lengths[row];
            const STORED *keys = k + pair * capacity * dim, *values = v + pair * capacity * dim;
            for (i64 g = 0; g < group; g++) {
                const STORED *own = q + row * q_stride + (head * group + g) * dim;
                float *w = s + g * capacity, top = -__builtin_inff(), total = 0.0f;
                for (i64 d = 0; d < dim; d++) query[d] = LOAD(own[d]) * scale;
                i64 p = 0;
                for (; p + 4 <= length; p += 4) { /* four sums at once: one would wait for itself */
                    const STORED *at = keys + p * dim;
                    float w0 = 0.0f, w1 = 0.0f, w2 = 0.0f, w3 = 0.0f;
                    for (i64 d = 0; d < dim; d++) {
                        w0 += query[d] * LOAD(at[d]);
                        w1 += query[d] * LOAD(at[d + dim]);
                        w2 += query[d] * LOAD(at[d + 2 * dim]);
                        w3 += query[d] * LOAD(at[d + 3 * dim]);
                    }
                    w[p] = w0, w[p + 1] = w1, w[p + 2] = w2, w[p + 3] = w3;
                }
                for (; p < length; p++) {
                    float dot = 0.0f;
                    for (i64 d = 0; d < dim; d++) dot += query[d] * LOAD(keys[p * dim + d]);
                    w[p] = dot;
                }
                for (p = 0; p < length; p++) top = w[p] > top ? w[p] : top;
                for (p = 0; p < length; p++) w[p] = exp_fast(w[p] - top);
                for (p = 0; p < length; p++) total += w[p];
                STORED *to = out + (row * kv_heads * group + head * group + g) * dim;
                for (i64 first = 0; first < dim; first += BLOCK) { /* as many sums as registers hold */
                    i64 width = dim - first < BLOCK ? dim - first : BLOCK;
                    float sum[BLOCK] = {0};
                    if (width == BLOCK)
                        for (p = 0; p < length; p++)
                            for (int d = 0; d < BLOCK; d++) sum[d] += w[p] * LOAD(values[p * dim + first + d]);
                    else
                        for (p = 0; p < length; p++)
                            for (i64 d = 0; d < width; d++) sum[d] += w[p] * LOAD(values[p * dim + first + d]);
                    for (i64 d = 0; d < width; d++) to[first + d] = STORE(sum[d] / total);
                }
            }
        }
    }
}

/* Root-mean-square norm: x [rows, size], weight [size], out [rows, size]. */
void NAME(norm)(const STORED *x, const STORED *weight, STORED *out, i64 rows, i64 size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 row = 0; row < rows; row++) {
        const STORED *in = x + row * size;
        float squares = 0.0f;
        for (i64 i = 0; i < size; i++) squares += LOAD(in[i]) * LOAD(in[i]);
        float factor = 1.0f / __builtin_sqrtf(squares / (float)size + eps);
        for (i64 i = 0; i < size; i++) out[row * size + i] = STORE(LOAD(in[i]) * factor * LOAD(weight[i]));
    }
}

/* silu(gate) * up: gate_up [rows, 2 * size], the gate first, out [rows, size]. */
void NAME(gated)(const STORED *gate_up, STORED *out, i64 rows, i64 size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 row = 0; row < rows; row++) {
        const STORED *gate = gate_up + row * 2 * size, *up = gate + size;
        for (i64 i = 0; i < size; i++) {
            float x = LOAD(gate[i]);
            out[row * size + i] = STORE(x / (1.0f + exp_fast(-x)) * LOAD(up[i]));
        }
    }
}

/* Rotate heads in place: x [rows, heads, dim] (row stride x_stride), cos [rows, dim] (its first halves are
 * read), sin [rows, dim / 2]. */
void NAME(rotate)(STORED *x, const STORED *cos, const STORED *sin, i64 rows, i64 heads, i64 dim, i64 x_stride,
                  int threads) {
    i64 half = dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 row = 0; row < rows; row++)
        for (i64 head = 0; head < heads; head++) {
            STORED *left = x + row * x_stride + head * dim, *right = left + half;
            const STORED *c = cos + row * dim, *s = sin + row * half;
            for (i64 d = 0; d < half; d++) {
                float a = LOAD(left[d]), b = LOAD(right[d]), cd = LOAD(c[d]), sd = LOAD(s[d]);
                left[d] = STORE(a * cd - b * sd);
                right[d] = STORE(b * cd + a * sd);
            }
        }
}

#endif
