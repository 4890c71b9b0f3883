// A decoder's work on CPUs with AVX-512 BF16: matrix products, norms, rotary embedding, attention over pages.
//
// Numbers are bfloat16 in memory and float32 where they are added up. Every sum runs in one order that depends on
// neither the number of rows nor that of threads, so a row's result never depends on its neighbours.
//
// A matrix that is multiplied from the right lies in panels of 16 columns: 16 pairs of rows (2k, 2k + 1) side by side,
// 64 bytes, the next pairs below. That is what one VDPBF16PS takes, and a panel is read from front to end.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

extern "C" int wf_supported() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

using bf16 = uint16_t;
using std::max;
using std::min;

constexpr long PANEL = 16, TILE_ROWS = 6, TILE_PANELS = 4;
constexpr long CHUNK_ROWS = 120;   // rows of a product that stay in the second-level cache while weights pass by
constexpr long KEY_BLOCK = 256;    // keys whose scores are kept at once
constexpr long QUERY_ROWS = 48;    // rows of a prefill tile: tokens times the query heads that share a KV head
constexpr long MAX_HEAD = 256, MAX_GROUP = 64;
constexpr float LOG2E = 1.4426950408889634f, NEVER = -std::numeric_limits<float>::infinity();

inline __m512 wide(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load16(const bf16* x) { return wide(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store16(bf16* x, __m512 value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), narrow(value)); }
inline __m512bh load32(const bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
inline __m512bh pair(const bf16* x) {
    int32_t both;
    std::memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
inline float number(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// 2**x for x <= 0 by Taylor's series around the nearest integer, exact to 2e-7; 0 from -126 down.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // in this order a NaN stays one
    __m512 whole = _mm512_roundscale_ps(x, 0);
    __m512 t = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// x / (1 + e**-x)
inline __m512 silu(__m512 x) {
    __m512 small = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-LOG2E)));  // e**-|x|, never too large
    __m512 one = _mm512_set1_ps(1.0f);
    __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 above = _mm512_mask_blend_ps(negative, one, small);
    return _mm512_div_ps(_mm512_mul_ps(x, above), _mm512_add_ps(one, small));
}

// sums[row][p] += a[row] @ panel p, for R rows that are `stride` numbers apart and P panels.
template <int R, int P>
inline void multiply(const bf16* a, long stride, const bf16* panels, long panel_size, long pairs, __m512 (&sums)[R][P]) {
    for (long k = 0; k < pairs; ++k) {
        __m512bh b[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) b[p] = load32(panels + p * panel_size + k * 2 * PANEL);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            __m512bh x = pair(a + r * stride + 2 * k);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], x, b[p]);
        }
    }
}

// Calls work<R, P>(row, panel) for tiles that cover `rows` rows, as even as can be, and up to four panels.
template <int P, class Work>
inline void for_rows(long rows, Work&& work) {
    long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long tile = 0, row = 0; tile < tiles; ++tile) {
        long stop = rows * (tile + 1) / tiles;
        switch (stop - row) {
            case 1: work.template operator()<1, P>(row); break;
            case 2: work.template operator()<2, P>(row); break;
            case 3: work.template operator()<3, P>(row); break;
            case 4: work.template operator()<4, P>(row); break;
            case 5: work.template operator()<5, P>(row); break;
            default: work.template operator()<6, P>(row);
        }
        row = stop;
    }
}

template <class Work>
inline void for_tiles(long rows, long panels, Work&& work) {
    switch (panels) {
        case 1: for_rows<1>(rows, work); break;
        case 2: for_rows<2>(rows, work); break;
        case 3: for_rows<3>(rows, work); break;
        default: for_rows<4>(rows, work);
    }
}

struct Range {
    long start, stop;
};

inline Range share(long units) {
    long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return {units * thread / threads, units * (thread + 1) / threads};
}

inline void normalise(bf16* out, const bf16* x, const bf16* weight, long width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    float rest = 0;
    long whole = width / 16 * 16;
    for (long i = 0; i < whole; i += 16) {
        __m512 value = load16(x + i);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    for (long i = whole; i < width; ++i) rest += number(x[i]) * number(x[i]);
    __m512 factor = _mm512_set1_ps(1.0f / std::sqrt((_mm512_reduce_add_ps(squares) + rest) / float(width) + eps));
    for (long i = 0; i < width; i += 16) {
        __mmask16 inside = width - i >= 16 ? 0xFFFF : (1 << (width - i)) - 1;
        __m512 value = wide(_mm256_maskz_loadu_epi16(inside, x + i));
        __m512 scale = wide(_mm256_maskz_loadu_epi16(inside, weight + i));
        value = wide(narrow(_mm512_mul_ps(value, factor)));  // rounded before the weight, as the checkpoints' code does
        _mm256_mask_storeu_epi16(out + i, inside, narrow(_mm512_mul_ps(value, scale)));
    }
}

}  // namespace

// Weight [columns, depth] into panels; columns are padded with zeros to a multiple of 16. depth is even.
extern "C" void wf_pack(bf16* panels, const bf16* weight, long columns, long depth) {
    long pairs = depth / 2;
    for (long first = 0; first < columns; first += PANEL) {
        bf16* panel = panels + first * depth;
        for (long k = 0; k < pairs; ++k)
            for (long column = 0; column < PANEL; ++column)
                for (long half = 0; half < 2; ++half)
                    panel[(k * PANEL + column) * 2 + half] =
                        first + column < columns ? weight[(first + column) * depth + 2 * k + half] : 0;
    }
}

enum { PLAIN = 0, ADD = 1, GATED = 2, WIDE = 3 };

// out = x @ weight.T + bias, [rows, columns]; x is [rows, depth].
// ADD: plus `residual`. WIDE: out is float32. GATED: the panels are in turn of a gate and of what it lets through, and
// out = silu(gate) * other, [rows, columns / 2]; columns are a multiple of 32.
extern "C" void wf_linear(void* out, const bf16* x, const bf16* weight, const bf16* bias, const bf16* residual,
                          long rows, long columns, long depth, long kind, long threads) {
    long panels = (columns + PANEL - 1) / PANEL, step = kind == GATED ? 2 : 1;
    long chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, units = panels / step;
#pragma omp parallel num_threads(threads)
    {
        Range mine = share(chunks * units);
        for (long unit = mine.start; unit < mine.stop;) {
            long chunk = unit / units, first = unit % units * step;
            long count = min({TILE_PANELS, panels - first, (mine.stop - unit) * step});
            long top = rows * chunk / chunks, bottom = rows * (chunk + 1) / chunks;
            const bf16* b = weight + first * PANEL * depth;
            for_tiles(bottom - top, count, [&]<int R, int P>(long row) {
                row += top;
                __m512 sums[R][P];
                for (int p = 0; p < P; ++p) {
                    long column = (first + p) * PANEL;
                    __mmask16 inside = columns - column >= PANEL ? 0xFFFF : (1 << (columns - column)) - 1;
                    __m512 start = bias ? wide(_mm256_maskz_loadu_epi16(inside, bias + column)) : _mm512_setzero_ps();
                    for (int r = 0; r < R; ++r) sums[r][p] = start;
                }
                multiply<R, P>(x + row * depth, depth, b, PANEL * depth, depth / 2, sums);
                for (int r = 0; r < R; ++r) {
                    if (kind == GATED) {
                        bf16* to = static_cast<bf16*>(out) + (row + r) * (columns / 2) + first / 2 * PANEL;
                        for (int p = 0; p + 1 < P; p += 2)
                            store16(to + p / 2 * PANEL, _mm512_mul_ps(silu(sums[r][p]), sums[r][p + 1]));
                        continue;
                    }
                    for (int p = 0; p < P; ++p) {
                        long column = (first + p) * PANEL, at = (row + r) * columns + column;
                        __mmask16 inside = columns - column >= PANEL ? 0xFFFF : (1 << (columns - column)) - 1;
                        __m512 sum = sums[r][p];
                        if (kind == ADD) sum = _mm512_add_ps(sum, wide(_mm256_maskz_loadu_epi16(inside, residual + at)));
                        if (kind == WIDE)
                            _mm512_mask_storeu_ps(static_cast<float*>(out) + at, inside, sum);
                        else
                            _mm256_mask_storeu_epi16(static_cast<bf16*>(out) + at, inside, narrow(sum));
                    }
                }
            });
            unit += count / step;
        }
    }
}

// RMSNorm of each row of x [rows, width].
extern "C" void wf_rms_norm(bf16* out, const bf16* x, const bf16* weight, long rows, long width, double eps,
                            long threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 32768)
    for (long row = 0; row < rows; ++row) normalise(out + row * width, x + row * width, weight, width, float(eps));
}

// Turns the q and k heads of qkv [rows, heads + 2 * kv_heads, head_dim] in place, and puts k and v into their slots.
// Optional (null): query_norm and key_norm [head_dim] before the turn; cosines and sines [rows, head_dim], the first
// half of the sines negative; keys and values, the layer's store [slots, kv_heads, head_dim].
extern "C" void wf_rotate(bf16* qkv, const bf16* cosines, const bf16* sines, const bf16* query_norm,
                          const bf16* key_norm, bf16* keys, bf16* values, const int64_t* slots, long rows, long heads,
                          long kv_heads, long head_dim, double eps, long threads) {
    long half = head_dim / 2, width = (heads + 2 * kv_heads) * head_dim;
#pragma omp parallel for num_threads(threads) if (rows * width > 32768)
    for (long row = 0; row < rows; ++row) {
        bf16* at = qkv + row * width;
        for (long head = 0; head < heads + kv_heads; ++head) {
            bf16* x = at + head * head_dim;
            if (query_norm) normalise(x, x, head < heads ? query_norm : key_norm, head_dim, float(eps));
            if (!cosines) continue;
            const bf16 *c = cosines + row * head_dim, *s = sines + row * head_dim;
            for (long i = 0; i < half; i += 16) {
                __m512 a = load16(x + i), b = load16(x + half + i);
                store16(x + i, _mm512_fmadd_ps(a, load16(c + i), _mm512_mul_ps(b, load16(s + i))));
                store16(x + half + i, _mm512_fmadd_ps(b, load16(c + half + i), _mm512_mul_ps(a, load16(s + half + i))));
            }
        }
        if (!keys) continue;
        size_t bytes = kv_heads * head_dim * sizeof(bf16);
        std::memcpy(keys + slots[row] * kv_heads * head_dim, at + heads * head_dim, bytes);
        std::memcpy(values + slots[row] * kv_heads * head_dim, at + (heads + kv_heads) * head_dim, bytes);
    }
}

namespace {

struct Span {
    int32_t first_row, num_rows, num_keys, packed;  // packed: where its keys lie in the scratch, in KEY_BLOCKs
};

struct Attention {
    bf16* out;
    const bf16 *queries, *keys, *values;
    const int32_t* tables;
    bf16* scratch;
    long query_stride, table_width, block_size, heads, kv_heads, head_dim;

    long group() const { return heads / kv_heads; }
    // Where keys and values of `count` tokens from `first` on lie.
    void find(long sequence, long first, long count, long head, const bf16** key, const bf16** value) const {
        const int32_t* block = tables + sequence * table_width + first / block_size;
        long offset = first % block_size, step = kv_heads * head_dim;
        for (long i = 0; i < count; ++block, offset = 0) {
            long at = (*block * block_size + offset) * step + head * head_dim;
            for (long stop = min(count, i + block_size - offset); i < stop; ++i, at += step)
                key[i] = keys + at, value[i] = values + at;
        }
    }
    // Keys and values of one KEY_BLOCK and head, as panels: of keys by 16 keys, of values by 16 channels.
    bf16* packed_keys(const Span& span, long block, long head) const {
        return scratch + ((span.packed + block) * kv_heads + head) * 2 * KEY_BLOCK * head_dim;
    }
    bf16* packed_values(const Span& span, long block, long head) const {
        return packed_keys(span, block, head) + KEY_BLOCK * head_dim;
    }
};

// Row i of the answer is lane i of all sixteen: the transpose of a 16 x 16 matrix of 32-bit numbers.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xDD);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xDD);
    }
}

// What is behind the last key becomes zero.
void pack(const Attention& run, long sequence, const Span& span, long block, long head) {
    long first = block * KEY_BLOCK, count = min(KEY_BLOCK, span.num_keys - first), d = run.head_dim;
    bf16 *keys = run.packed_keys(span, block, head), *values = run.packed_values(span, block, head);
    const __m512i nothing = _mm512_setzero_si512();
    const bf16 *from_keys[KEY_BLOCK] = {}, *from_values[KEY_BLOCK] = {};
    run.find(sequence, first, count, head, from_keys, from_values);
    for (long panel = 0; panel * PANEL < count; ++panel) {
        const bf16** from = from_keys + panel * PANEL;
        for (long channel = 0; channel < d; channel += 32) {
            __m512i x[16];
            for (long i = 0; i < PANEL; ++i) x[i] = from[i] ? _mm512_loadu_si512(from[i] + channel) : nothing;
            transpose(x);
            for (long i = 0; i < 16; ++i) _mm512_storeu_si512(keys + panel * PANEL * d + (channel / 2 + i) * 32, x[i]);
        }
    }
    long padded = (count + PANEL - 1) / PANEL * PANEL;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (long key = 0; key < padded; key += 2) {
        const bf16 *even = from_values[key], *odd = from_values[key + 1];
        for (long channel = 0; channel < d; channel += 32) {
            __m512i a = even ? _mm512_loadu_si512(even + channel) : nothing;
            __m512i b = odd ? _mm512_loadu_si512(odd + channel) : nothing;
            bf16* to = values + channel * KEY_BLOCK + key / 2 * 32;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + PANEL * KEY_BLOCK, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// Shares of `count` keys for one row: scores become 2**(score * scale - best), bfloat16, zero up to `padded`.
struct Softmax {
    float best = NEVER, total = 0;

    // The factor that all earlier sums must be multiplied with.
    float add(bf16* shares, float* scores, long count, long padded, float scale) {
        __m512 largest = _mm512_set1_ps(NEVER);
        for (long i = count; i < padded; ++i) scores[i] = NEVER;
        for (long i = 0; i < padded; i += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
        float higher = max(best, _mm512_reduce_max_ps(largest) * scale);
        __m512 sum = _mm512_setzero_ps();
        for (long i = 0; i < padded; i += 16) {
            __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(scale), _mm512_set1_ps(higher));
            x = exp2(x);
            sum = _mm512_add_ps(sum, x);
            store16(shares + i, x);
        }
        float keep = best == NEVER ? 0.0f : _mm512_cvtss_f32(exp2(_mm512_set1_ps(best - higher)));
        total = total * keep + _mm512_reduce_add_ps(sum);
        best = higher;
        return keep;
    }
};

// The rows of `tokens` tokens of a chunk from `first` on, for one KV head.
void prefill_tile(const Attention& run, const Span& span, long first, long tokens, long head) {
    const long d = run.head_dim, group = run.group(), rows = tokens * group, before = span.num_keys - span.num_rows;
    const float scale = LOG2E / std::sqrt(float(d));
    alignas(64) static thread_local bf16 queries[MAX_GROUP * MAX_HEAD];
    alignas(64) static thread_local float scores[MAX_GROUP * KEY_BLOCK];
    alignas(64) static thread_local bf16 shares[MAX_GROUP * KEY_BLOCK];
    alignas(64) static thread_local float answer[MAX_GROUP * MAX_HEAD];
    Softmax softmax[MAX_GROUP];
    for (long token = 0; token < tokens; ++token)
        std::memcpy(queries + token * group * d,
                    run.queries + (span.first_row + first + token) * run.query_stride + head * group * d,
                    group * d * sizeof(bf16));
    std::memset(answer, 0, rows * d * sizeof(float));
    const long visible = before + first + tokens;
    for (long start = 0; start < visible; start += KEY_BLOCK) {
        const bf16* keys = run.packed_keys(span, start / KEY_BLOCK, head);
        const bf16* values = run.packed_values(span, start / KEY_BLOCK, head);
        long count = min(KEY_BLOCK, visible - start), padded = (count + PANEL - 1) / PANEL * PANEL;
        for (long panel = 0; panel < padded / PANEL; panel += TILE_PANELS)
            for_tiles(rows, min(TILE_PANELS, padded / PANEL - panel), [&]<int R, int P>(long row) {
                __m512 sums[R][P];
                for (auto& sum : sums)
                    for (auto& one : sum) one = _mm512_setzero_ps();
                multiply<R, P>(queries + row * d, d, keys + panel * PANEL * d, PANEL * d, d / 2, sums);
                for (int r = 0; r < R; ++r)
                    for (int p = 0; p < P; ++p)
                        _mm512_storeu_ps(scores + (row + r) * KEY_BLOCK + (panel + p) * PANEL, sums[r][p]);
            });
        for (long row = 0; row < rows; ++row) {
            long seen = min(padded, before + first + row / group + 1 - start);
            if (seen <= 0) {
                std::memset(shares + row * KEY_BLOCK, 0, padded * sizeof(bf16));
                continue;
            }
            float keep = softmax[row].add(shares + row * KEY_BLOCK, scores + row * KEY_BLOCK, seen, padded, scale);
            for (long i = 0; start > 0 && i < d; i += 16) {
                float* at = answer + row * d + i;
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(keep)));
            }
        }
        for (long panel = 0; panel < d / PANEL; panel += TILE_PANELS)
            for_tiles(rows, min(TILE_PANELS, d / PANEL - panel), [&]<int R, int P>(long row) {
                __m512 sums[R][P];
                for (int r = 0; r < R; ++r)
                    for (int p = 0; p < P; ++p) sums[r][p] = _mm512_load_ps(answer + (row + r) * d + (panel + p) * PANEL);
                multiply<R, P>(shares + row * KEY_BLOCK, KEY_BLOCK, values + panel * PANEL * KEY_BLOCK,
                               PANEL * KEY_BLOCK, padded / 2, sums);
                for (int r = 0; r < R; ++r)
                    for (int p = 0; p < P; ++p) _mm512_store_ps(answer + (row + r) * d + (panel + p) * PANEL, sums[r][p]);
            });
    }
    for (long row = 0; row < rows; ++row) {
        bf16* to = run.out + ((span.first_row + first + row / group) * run.heads + head * group + row % group) * d;
        __m512 factor = _mm512_set1_ps(1.0f / softmax[row].total);
        for (long i = 0; i < d; i += 16) store16(to + i, _mm512_mul_ps(_mm512_load_ps(answer + row * d + i), factor));
    }
}

// The sums of sixteen vectors, one per lane: halved four times, within lanes of 128 bits and then across them.
inline __m512 sums_of(__m512 (&x)[16]) {
    for (int i = 0; i < 8; ++i)
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int width = 2; width; width /= 2)
        for (int i = 0; i < width; ++i)
            x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xDD));
    return x[0];
}

// answer[g] += shares[g] @ values for G rows and 32 channels; `rows` are the values, an even number of them.
template <int G>
inline void add_values(float* answer, long stride, const bf16* shares, const bf16* const* rows, long count, long channel) {
    __m512 low[G], high[G];
    for (int g = 0; g < G; ++g) low[g] = high[g] = _mm512_setzero_ps();
    for (long key = 0; key < count; key += 2) {
        __m512i a = _mm512_loadu_si512(rows[key] + channel), b = _mm512_loadu_si512(rows[key + 1] + channel);
        __m512bh first = (__m512bh)_mm512_unpacklo_epi16(a, b), second = (__m512bh)_mm512_unpackhi_epi16(a, b);
        for (int g = 0; g < G; ++g) {
            __m512bh share = pair(shares + g * KEY_BLOCK + key);
            low[g] = _mm512_dpbf16_ps(low[g], share, first);
            high[g] = _mm512_dpbf16_ps(high[g], share, second);
        }
    }
    // unpack works within lanes of 8 channels: the first four of each are in `low`.
    const __m512i front = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i back = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int g = 0; g < G; ++g) {
        float* at = answer + g * stride + channel;
        _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), _mm512_permutex2var_ps(low[g], front, high[g])));
        _mm512_store_ps(at + 16, _mm512_add_ps(_mm512_load_ps(at + 16), _mm512_permutex2var_ps(low[g], back, high[g])));
    }
}

// One token's row, for one KV head. Nothing is packed: every key is read once.
void decode_row(const Attention& run, long sequence, const Span& span, long head) {
    const long d = run.head_dim, group = run.group();
    const float scale = LOG2E / std::sqrt(float(d));
    alignas(64) static thread_local float scores[MAX_GROUP * KEY_BLOCK];
    alignas(64) static thread_local bf16 shares[MAX_GROUP * KEY_BLOCK];
    alignas(64) static thread_local float answer[MAX_GROUP * MAX_HEAD];
    Softmax softmax[MAX_GROUP];
    const bf16 *keys[KEY_BLOCK], *values[KEY_BLOCK];
    const bf16* queries = run.queries + span.first_row * run.query_stride + head * group * d;
    std::memset(answer, 0, group * d * sizeof(float));
    for (long start = 0; start < span.num_keys; start += KEY_BLOCK) {
        long count = min(KEY_BLOCK, span.num_keys - start), padded = (count + PANEL - 1) / PANEL * PANEL;
        run.find(sequence, start, count, head, keys, values);
        for (long i = count; i < padded; ++i) keys[i] = keys[count - 1], values[i] = values[count - 1];
        for (long first = 0; first < padded; first += 16)
            for (long g = 0; g < group; ++g) {
                __m512 sums[16];
                for (int i = 0; i < 16; ++i) {
                    sums[i] = _mm512_setzero_ps();
                    for (long channel = 0; channel < d; channel += 32)
                        sums[i] = _mm512_dpbf16_ps(sums[i], load32(queries + g * d + channel),
                                                   load32(keys[first + i] + channel));
                }
                _mm512_store_ps(scores + g * KEY_BLOCK + first, sums_of(sums));
            }
        for (long g = 0; g < group; ++g) {
            float keep = softmax[g].add(shares + g * KEY_BLOCK, scores + g * KEY_BLOCK, count, padded, scale);
            for (long i = 0; start > 0 && i < d; i += 16) {
                float* at = answer + g * d + i;
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(keep)));
            }
        }
        for (long channel = 0; channel < d; channel += 32)
            for (long g = 0; g < group; g += 4) {
                float* to = answer + g * d;
                const bf16* from = shares + g * KEY_BLOCK;
                switch (group - g) {
                    case 1: add_values<1>(to, d, from, values, padded, channel); break;
                    case 2: add_values<2>(to, d, from, values, padded, channel); break;
                    case 3: add_values<3>(to, d, from, values, padded, channel); break;
                    default: add_values<4>(to, d, from, values, padded, channel);
                }
            }
    }
    bf16* to = run.out + (span.first_row * run.heads + head * group) * d;
    for (long g = 0; g < group; ++g) {
        __m512 factor = _mm512_set1_ps(1.0f / softmax[g].total);
        for (long i = 0; i < d; i += 16) store16(to + g * d + i, _mm512_mul_ps(_mm512_load_ps(answer + g * d + i), factor));
    }
}

}  // namespace

// Bytes of scratch per KEY_BLOCK keys of a chunk, and the size of such a block.
extern "C" long wf_key_block() { return KEY_BLOCK; }

// Causal attention of every sequence over its own blocks: out [rows, heads, head_dim] of queries whose rows are
// query_stride numbers apart. spans is int32 [sequences, 4] (see Span), tables int32 [sequences, table_width], scratch
// holds keys and values of all chunks in whole KEY_BLOCKs. head_dim is a multiple of 32, at most 256, and there are at
// most 64 query heads per KV head. Rows in no span stay as they are.
extern "C" void wf_attend(bf16* out, const bf16* queries, const bf16* keys, const bf16* values, const int32_t* spans,
                          const int32_t* tables, bf16* scratch, long sequences, long query_stride, long table_width,
                          long block_size, long heads, long kv_heads, long head_dim, long threads) {
    const Span* all = reinterpret_cast<const Span*>(spans);
    Attention run{out,        queries,    keys,  values,   tables,  scratch, query_stride,
                  table_width, block_size, heads, kv_heads, head_dim};
    const long tokens = max(1L, QUERY_ROWS / run.group());
#pragma omp parallel num_threads(threads)
    {
        for (long sequence = 0; sequence < sequences; ++sequence) {
            const Span& span = all[sequence];
            if (span.num_rows == 1) continue;
            long blocks = (span.num_keys + KEY_BLOCK - 1) / KEY_BLOCK;
#pragma omp for schedule(dynamic) nowait
            for (long task = 0; task < blocks * kv_heads; ++task)
                pack(run, sequence, span, task / kv_heads, task % kv_heads);
        }
#pragma omp barrier
        for (long sequence = 0; sequence < sequences; ++sequence) {
            const Span& span = all[sequence];
            if (span.num_rows == 1) continue;
            long tiles = (span.num_rows + tokens - 1) / tokens;
#pragma omp for schedule(dynamic) nowait
            for (long task = 0; task < tiles * kv_heads; ++task) {
                long first = (tiles - 1 - task / kv_heads) * tokens;  // those with the most keys first
                prefill_tile(run, span, first, min(tokens, span.num_rows - first), task % kv_heads);
            }
        }
#pragma omp for schedule(dynamic) nowait
        for (long task = 0; task < sequences * kv_heads; ++task) {
            const Span& span = all[task / kv_heads];
            if (span.num_rows == 1) decode_row(run, task / kv_heads, span, task % kv_heads);
        }
    }
}
