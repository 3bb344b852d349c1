// Attention of queries to the keys and values of their row's blocks, by online softmax.
//
// The context is cut at absolute positions: SEGMENT keys are summed on their own and segments are merged in ascending
// order; inside one, TILE keys make one step of the softmax. Every query goes through the same sums whether it shares
// its pass with none or with sixty others, and whether one thread or many take its segments: sharing only decides what
// is loaded once. Keys that no query of the pass may see are not read at all. Scores are kept in units of log 2.
#include "attention.h"

#include <limits>
#include <type_traits>

#include "attention_load.h"
#include "attention_tiles.h"
#include "scratch.h"

using namespace vec;

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int KEYS = 2 * W;  // keys that a micro-kernel scores
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int BLOCK_ROWS = 3;  // rows of one micro-kernel: 4 accumulators each
#else
constexpr int BLOCK_ROWS = 6;
#endif

struct State {   // an unnormalised result over some keys
    float* out;  // [R, Dv padded]
    float* max;  // [R]
    float* sum;  // [R]
    State(float* at, int64_t rows, int64_t width)
        : out(at), max(at + state_floats(rows, width) - 2 * rows), sum(max + rows) {}
};

struct Pass {  // one item's buffers; its rows are (group, query, head of the group)
    const AttentionShape& shape;
    const AttentionItem &item, *upcoming;  // the latter: what this thread will probably do next, or null
    const int32_t *tables, *table;
    int64_t heads, group_rows, rows, DP, DvP;
    float *q, *keys, *scores, *values, *lane_sums, *zeros;
    float* end;

    Pass(const AttentionShape& s, const AttentionItem& i, const int32_t* all_tables, const AttentionItem* after)
        : shape(s), item(i), upcoming(after), tables(all_tables), table(tables + i.row * s.table_stride), heads(s.H / s.G),
          group_rows(i.num_queries * heads),
          rows(group_rows * i.num_groups), DP(padded_width(s.D)), DvP(padded_width(s.Dv)) {
        const int64_t key_floats = DP * std::max(KEYS, TILE / 2), slack = 15;  // rows that products of tiles run over
        int64_t working = (rows + slack) * (DP + W) + (group_rows + slack) * TILE + TILE * DvP + key_floats + DP + DvP;
        float* at = thread_scratch(working + 2 * state_floats(rows, DvP));
        auto take = [&](int64_t floats) { return (at += floats) - floats; };
        q = take((rows + slack) * DP), keys = take(key_floats), scores = take((group_rows + slack) * TILE);
        values = take(TILE * DvP);
        lane_sums = take(rows * W), zeros = take(DP + DvP), end = at;
        std::fill(zeros, end, 0.0f);
    }

    State state(int i) const { return State(end + i * state_floats(rows, DvP), rows, DvP); }

    void find_first(const AttentionItem& of, int64_t segment, Tile& tile) const {
        const Span span(shape, of, segment);
        tile.find(tables + of.row * shape.table_stride, shape.block_size, span.begin / TILE * TILE, span);
    }

    // The first tile behind a segment, and whose it is; null: there is none to bring in.
    const AttentionItem* find_next(int64_t segment, Tile& tile) const {
        const bool ends = segment + 1 == item.end_segment;
        const AttentionItem* owner = ends ? upcoming : &item;
        if (!owner) return nullptr;
        find_first(*owner, ends ? owner->first_segment : segment + 1, tile);
        return owner;
    }
};

SPECDEC_INLINE F scaled(F score, float scale, float softcap) {
    score = score * scale;
    if (softcap > 0) score = softcap * tanh(score / softcap);
    return score * LOG2_E;
}

// scores[r][:] = q[r] . keys, for KEYS keys
template <typename T, int ROWS>
void score_rows(const float* q, const float* keys, int64_t DP, float scale, float softcap, float* scores, Ahead& ahead) {
    Ahead lines = ahead;
    F even[ROWS][2], odd[ROWS][2];  // sums over even and odd d, so that few rows do not wait for each other
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = F{};
    for (int64_t d = 0; d < DP; d += 2) {
        lines.fetch<T>();
        F key0 = load(keys + d * KEYS), key1 = load(keys + d * KEYS + W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            F a = splat(q[r * DP + d]);
            even[r][0] = fma(a, key0, even[r][0]);
            even[r][1] = fma(a, key1, even[r][1]);
        }
        key0 = load(keys + (d + 1) * KEYS), key1 = load(keys + (d + 1) * KEYS + W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            F a = splat(q[r * DP + d + 1]);
            odd[r][0] = fma(a, key0, odd[r][0]);
            odd[r][1] = fma(a, key1, odd[r][1]);
        }
    }
    ahead = lines;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 2; ++i) {
            F score = scaled(even[r][i] + odd[r][i], scale, softcap);
            store(scores + r * TILE + i * W, score);
        }
}

template <typename T>
struct Scattered {  // values where they lie in the cache
    const T* values;
    const int64_t* slots;
    int64_t stride;
    const T* row(int key) const { return values + slots[key] * stride; }
    Scattered shifted(int64_t d) const { return {values + d, slots, stride}; }
};

struct Gathered {  // values of a tile, in float
    const float* values;
    int64_t stride;
    const float* row(int key) const { return values + key * stride; }
    Gathered shifted(int64_t d) const { return {values + d, stride}; }
};

// out[r] += sum over keys of weights[r][key] * values[key], for PAIRS * 2 vectors of the width
template <typename T, int ROWS, int PAIRS, typename Values>
__attribute__((noinline)) void add_values(const float* weights, Values values, int from, int to, int64_t width, float* out,
                                          Ahead& ahead) {
    constexpr int N = 2 * PAIRS;
    Ahead lines = ahead;
    F acc[ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = load(out + r * width + n * W);
    for (int key = from; key < to; ++key) {
        lines.fetch<T>();
        auto* at = values.row(key);
        const float* weight_at = weights + key;
#pragma GCC unroll 4
        for (int n = 0; n < N; n += 2) {
            F first, second;
            load_pair(at + n * W, first, second);
            asm("" : "+r"(weight_at));  // weights are loaded again for every pair: there are no registers to keep them in
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                F weight = splat(weight_at[r * TILE]);
                acc[r][n] = fma(weight, first, acc[r][n]);
                acc[r][n + 1] = fma(weight, second, acc[r][n + 1]);
            }
        }
    }
    ahead = lines;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) store(out + r * width + n * W, acc[r][n]);
}

template <typename T, int ROWS, typename Values>
void add_values_wide(const float* weights, Values values, int from, int to, int64_t width, float* out, Ahead& ahead) {
    int64_t d = 0;
    for (; d + 4 * W <= width; d += 4 * W)
        add_values<T, ROWS, 2>(weights, values.shifted(d), from, to, width, out + d, ahead);
    if (d < width) add_values<T, ROWS, 1>(weights, values.shifted(d), from, to, width, out + d, ahead);
}

template <typename Body>
SPECDEC_INLINE void for_row_blocks(int64_t rows, Body body) {
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS) body(r, std::integral_constant<int, BLOCK_ROWS>());
    switch (rows - r) {
        case 1: return body(r, std::integral_constant<int, 1>());
        case 2: return body(r, std::integral_constant<int, 2>());
#if !defined(__AVX2__) || defined(__AVX512F__)
        case 3: return body(r, std::integral_constant<int, 3>());
        case 4: return body(r, std::integral_constant<int, 4>());
        case 5: return body(r, std::integral_constant<int, 5>());
#endif
    }
}

// One step of the online softmax for one row: scores become weights in place, and out is rescaled where the maximum
// grew. [from, to): the keys of the tile that this row sees.
template <typename Scale>
SPECDEC_INLINE void soften_row(float* scores, Scale scale, int from, int to, float* max, float* lane_sum, float* out,
                               int64_t width) {
    constexpr int N = TILE / W;
    F score[N], top = splat(NONE);
    const bool is_cut = from > 0 || to < TILE;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        score[n] = scale(load(scores + n * W));
        if (is_cut) {
            I at;
            for (int i = 0; i < W; ++i) at[i] = n * W + i;
            score[n] = (at >= splat_int(from)) & (at < splat_int(to)) ? score[n] : splat(NONE);
        }
        top = vec::max(top, score[n]);
    }
    float new_max = std::max(*max, max_lane(top));
    if (new_max == NONE) {  // nothing seen yet, here or before
        for (int n = 0; n < N; ++n) store(scores + n * W, F{});
        return;
    }
    F total = F{};
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        F weight = exp2_negative(score[n] - new_max);
        store(scores + n * W, weight);
        total = total + weight;
    }
    if (new_max == *max) return store(lane_sum, load(lane_sum) + total);
    F shrink = exp2_negative(splat(*max - new_max));
    *max = new_max;
    store(lane_sum, load(lane_sum) * shrink + total);
    for (int64_t d = 0; d < width; d += W) store(out + d, load(out + d) * shrink);
}

// One group's keys and values of one tile, while the next tile is brought in.
template <typename T>
void attend_tile(const Pass& pass, int64_t group, const T* k, const T* v, const Tile& tile, NextTile& next, State& state) {
    const AttentionShape& shape = pass.shape;
    const int from = tile.from, to = tile.to;
    const int64_t k_stride = shape.G * shape.D, v_stride = shape.G * shape.Dv, first_row = group * pass.group_rows;
    const float* q = pass.q + first_row * pass.DP;
    float *max = state.max + first_row, *sums = pass.lane_sums + first_row * W, *out = state.out + first_row * pass.DvP;

    for (int part = from / KEYS * KEYS; part < to; part += KEYS) {
        const T* rows[KEYS];
        for (int i = 0; i < KEYS; ++i)
            rows[i] = part + i >= from && part + i < to ? k + tile.slots[part + i] * k_stride : (const T*)pass.zeros;
        transpose_keys<KEYS>(rows, shape.D, pass.DP, pass.keys);
        transpose_keys<KEYS>(rows + W, shape.D, pass.DP, pass.keys + W);
        for_row_blocks(pass.group_rows, [&](int64_t r, auto count) {
            score_rows<T, decltype(count)::value>(q + r * pass.DP, pass.keys, pass.DP, shape.scale, shape.softcap,
                                                  pass.scores + r * TILE + part, next.keys);
        });
    }
    for (int64_t r = 0; r < pass.group_rows; ++r) {
        int64_t own = pass.item.position + r / pass.heads - tile.start;
        int first = shape.window ? std::max<int64_t>(from, own - shape.window + 1) : from;
        soften_row(pass.scores + r * TILE, [](F score) { return score; }, first, std::min<int64_t>(to, own + 1), max + r,
                   sums + r * W, out + r * pass.DvP, pass.DvP);
    }
    const bool in_place = pass.DvP == shape.Dv && (sizeof(T) == 4 || W == 8 || pass.group_rows <= 4 * BLOCK_ROWS);
    if (!in_place)
        for (int key = from; key < to; ++key)
            widen_pairs(v + tile.slots[key] * v_stride, shape.Dv, pass.DvP, pass.values + key * pass.DvP);
    for_row_blocks(pass.group_rows, [&](int64_t r, auto count) {
        constexpr int ROWS = decltype(count)::value;
        float *weights = pass.scores + r * TILE, *o = out + r * pass.DvP;
        if (in_place)
            add_values_wide<T, ROWS>(weights, Scattered<T>{v, tile.slots, v_stride}, from, to, pass.DvP, o,
                                     next.values);
        else
            add_values_wide<T, ROWS>(weights, Gathered{pass.values, pass.DvP}, from, to, pass.DvP, o,
                                     next.values);
    });
}

#if SPECDEC_HAS_TILES

// The same on matrix units.
void attend_tile_in_tiles(const Pass& pass, int64_t group, const bf16* k, const bf16* v, const Tile& tile,
                          RowsAhead& next, State& state) {
    const AttentionShape& shape = pass.shape;
    const int from = tile.from, to = tile.to;
    const int64_t k_stride = shape.G * shape.D, v_stride = shape.G * shape.Dv, first_row = group * pass.group_rows;
    const int64_t block = attention_tiles::block_rows(pass.group_rows);
    const float* q = pass.q + first_row * shape.D;
    float *max = state.max + first_row, *sums = pass.lane_sums + first_row * W, *out = state.out + first_row * shape.Dv;
    bf16 *keys = (bf16*)pass.keys, *values = (bf16*)pass.values;
    auto row = [&](const bf16* at, int key, int64_t stride) {
        return key >= from && key < to ? at + tile.slots[key] * stride : (const bf16*)pass.zeros;
    };
    for (int part = 0; part < TILE; part += 16, keys += shape.D * 16) {
        if (part + 16 <= from || part >= to) continue;
        const bf16* rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = row(k, part + i, k_stride);
        attention_tiles::pack_keys(rows, shape.D, keys);
    }
    for (int64_t r = 0; r < pass.group_rows; r += block)
        attention_tiles::score(q + r * shape.D, shape.D, (const bf16*)pass.keys, pass.scores + r * TILE, next);
    const float unit = shape.scale * LOG2_E;
    auto scale = [&](F score) { return shape.softcap > 0 ? scaled(score, shape.scale, shape.softcap) : score * unit; };
    for (int64_t query = 0, r = 0; query < pass.item.num_queries; ++query) {
        const int64_t own = pass.item.position + query - tile.start;  // in the tile
        const int first = shape.window ? std::max<int64_t>(from, own - shape.window + 1) : from;
        const int last = std::min<int64_t>(to, own + 1);
        for (int64_t head = 0; head < pass.heads; ++head, ++r) {
            soften_row(pass.scores + r * TILE, scale, first, last, max + r, sums + r * W, out + r * shape.Dv, shape.Dv);
            next.fetch();
            attention_tiles::split_weights(pass.scores + r * TILE);
            next.fetch();
        }
    }
    const int64_t used = (pass.group_rows + block - 1) / block * block;
    std::fill(pass.scores + pass.group_rows * TILE, pass.scores + used * TILE, 0.0f);
    constexpr int STEP = attention_tiles::STEP;
    for (int step = from / STEP; step * STEP < to; ++step)
        for (int pair = 0, key = step * STEP; pair < STEP / 2; ++pair, key += 2)
            attention_tiles::pack_values(row(v, key, v_stride), row(v, key + 1, v_stride), shape.Dv, pair,
                                         values + step * STEP * shape.Dv);
    for (int64_t r = 0; r < pass.group_rows; r += block)
        attention_tiles::add_values(pass.scores + r * TILE, values, from, to, shape.Dv, out + r * shape.Dv, next);
}

#endif

template <typename T>
void attend_segment(const Pass& pass, const T* k, const T* v, int64_t segment, State state) {
    const AttentionShape& shape = pass.shape;
    std::fill(state.max, state.max + pass.rows, NONE);
    std::fill(state.out, state.max, 0.0f);
    std::fill(pass.lane_sums, pass.lane_sums + pass.rows * W, 0.0f);
    const Span span(shape, pass.item, segment);
    Tile tiles[2];
    tiles[0].find(pass.table, shape.block_size, span.begin / TILE * TILE, span);
    const int64_t row_blocks = (pass.group_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t i = 0; tiles[i].from < tiles[i].to; i ^= 1) {
        tiles[i ^ 1].find(pass.table, shape.block_size, tiles[i].start + TILE, span);
        Tile after;
        const AttentionItem* owner = tiles[i ^ 1].from < tiles[i ^ 1].to ? nullptr : pass.find_next(segment, after);
        NextTile next(shape, owner ? *owner : pass.item, owner ? after : tiles[i ^ 1], k, v, row_blocks);
        RowsAhead rows(shape, owner ? *owner : pass.item, owner ? after : tiles[i ^ 1], k, v, pass.group_rows);
        for (int64_t g = 0; g < pass.item.num_groups; ++g) {
            int64_t group = pass.item.first_group + g;
            const T *k_group = k + group * shape.D, *v_group = v + group * shape.Dv;
#if SPECDEC_HAS_TILES
            if constexpr (sizeof(T) == 2)
                if (shape.is_tiled()) {
                    attend_tile_in_tiles(pass, g, k_group, v_group, tiles[i], rows, state);
                    continue;
                }
#endif
            attend_tile(pass, g, k_group, v_group, tiles[i], next, state);
        }
    }
    for (int64_t r = 0; r < pass.rows; ++r) state.sum[r] = vec::sum(load(pass.lane_sums + r * W));
}

void merge(State total, State part, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
        if (part.max[r] == NONE) continue;
        float top = std::max(total.max[r], part.max[r]);
        F old_weight = exp2_negative(splat(total.max[r] - top)), new_weight = exp2_negative(splat(part.max[r] - top));
        total.max[r] = top;
        total.sum[r] = fma(splat(total.sum[r]), old_weight, splat(part.sum[r]) * new_weight)[0];
        for (int64_t d = 0; d < width; d += W) {
            float* out = total.out + r * width + d;
            store(out, fma(load(out), old_weight, load(part.out + r * width + d) * new_weight));
        }
    }
}

template <typename Out>
void finish(const AttentionShape& shape, const AttentionItem& item, State state, const float* sinks, Out* out) {
    const int64_t heads = shape.H / shape.G, group_rows = item.num_queries * heads, DvP = padded_width(shape.Dv);
    for (int64_t r = 0; r < group_rows * item.num_groups; ++r) {
        int64_t group = item.first_group + r / group_rows, query = item.first_query + r % group_rows / heads;
        int64_t head = group * heads + r % heads;
        float sum = state.sum[r], weight = 1;
        if (sinks) {  // one more logit, with no value
            float sink = sinks[head] * LOG2_E, top = std::max(state.max[r], sink);
            weight = exp2_negative(splat(state.max[r] - top))[0];
            sum = fma(splat(sum), splat(weight), exp2_negative(splat(sink - top)))[0];
        }
        weight = sum > 0 || sum != sum ? weight / sum : 0;
        float* row = state.out + r * DvP;
#if SPECDEC_HAS_TILES
        if (shape.is_tiled())
            attention_tiles::put_in_order(row, DvP);
        else
#endif
            if (shape.kv_dtype == BFLOAT16)
            put_pairs_in_order(row, DvP);
        for (int64_t d = 0; d < shape.Dv; d += W)
            store_first(out + (query * shape.H + head) * shape.Dv + d, load(row + d) * weight, shape.Dv - d);
    }
}

void finish(const AttentionShape& shape, const AttentionItem& item, State state, const float* sinks, void* out) {
    if (shape.out_dtype == BFLOAT16)
        finish(shape, item, state, sinks, (bf16*)out);
    else
        finish(shape, item, state, sinks, (float*)out);
}

// Loads what the first tile will read, in the order in which it lies in memory, where nobody brought it in ahead.
template <typename T>
__attribute__((noinline)) void touch(const Pass& pass, const T* k, const T* v) {
    const AttentionItem& item = pass.item;
    Tile tile;
    pass.find_first(item, item.first_segment, tile);
    float x = 0;
    auto touch_rows = [&](const T* cache, int64_t width) {
        for (int key = tile.from; key < tile.to; ++key) {
            const T* row = cache + (tile.slots[key] * pass.shape.G + item.first_group) * width;
            for (int64_t d = 0; d < item.num_groups * width; d += Ahead::LINE / (int64_t)sizeof(T)) x += to_float(row[d]);
        }
    };
    touch_rows(k, pass.shape.D);
    touch_rows(v, pass.shape.Dv);
    asm volatile("" : "+m"(x));  // it is used
}

template <typename T>
void attend(const AttentionShape& shape, const AttentionItem& item, const void* q, const T* k, const T* v,
            const int32_t* tables, const float* sinks, void* out, float* parts, const AttentionItem* upcoming,
            bool is_cold) {
    Pass pass(shape, item, tables, upcoming);
    for (int64_t r = 0; r < pass.rows; ++r) {
        int64_t group = item.first_group + r / pass.group_rows;
        int64_t query = item.first_query + r % pass.group_rows / pass.heads;
        int64_t at = query * shape.q_stride + (group * pass.heads + r % pass.heads) * shape.D;
#if SPECDEC_HAS_TILES
        if (shape.is_tiled()) {
            if (shape.q_dtype == BFLOAT16)
                attention_tiles::split_query((const bf16*)q + at, shape.D, pass.q + r * shape.D);
            else
                attention_tiles::split_query((const float*)q + at, shape.D, pass.q + r * shape.D);
            continue;
        }
#endif
        if (shape.q_dtype == BFLOAT16)
            widen_row((const bf16*)q + at, shape.D, pass.DP, pass.q + r * pass.DP);
        else
            widen_row((const float*)q + at, shape.D, pass.DP, pass.q + r * pass.DP);
    }
    if (is_cold) touch(pass, k, v);
    const int64_t first = item.first_segment, end = item.end_segment;
    if (item.part >= 0) {
        for (int64_t s = first; s < end; ++s) {
            int64_t at = item.part + (s - first) * state_floats(pass.rows, pass.DvP);
            attend_segment(pass, k, v, s, State(parts + at, pass.rows, pass.DvP));
        }
        return;
    }
    attend_segment(pass, k, v, first, pass.state(0));
    for (int64_t s = first + 1; s < end; ++s) {
        attend_segment(pass, k, v, s, pass.state(1));
        merge(pass.state(0), pass.state(1), pass.rows, pass.DvP);
    }
    finish(shape, item, pass.state(0), sinks, out);
}

}  // namespace

void attention_team(Team& team, const AttentionShape& shape, const AttentionPlan& plan, const void* q,
                    const void* k_cache, const void* v_cache, const int32_t* block_tables, const float* sinks, void* out,
                    float* parts) {
    auto run_item = [&](int64_t i) {
        const AttentionItem& item = plan.items[i];
        const int64_t after = i + team.size();
        const AttentionItem* upcoming = after < (int64_t)plan.items.size() ? &plan.items[after] : nullptr;
        if (shape.is_tiled()) tiles::enter(attention_tiles::block_rows(item.num_queries * (shape.H / shape.G)));
        if (shape.kv_dtype == BFLOAT16)
            attend(shape, item, q, (const bf16*)k_cache, (const bf16*)v_cache, block_tables, sinks, out, parts,
                   upcoming, i < team.size());
        else
            attend(shape, item, q, (const float*)k_cache, (const float*)v_cache, block_tables, sinks, out, parts,
                   upcoming, i < team.size());
    };
    team.share(plan.items.size(), run_item);
    if (shape.is_tiled()) tiles::leave();
    if (plan.merges.empty()) return;
    auto run_merge = [&](int64_t i) {
        const AttentionItem& whole = plan.merges[i];
        const int64_t rows = whole.num_queries * (shape.H / shape.G) * whole.num_groups, width = padded_width(shape.Dv);
        auto state = [&](int64_t s) {
            return State(parts + whole.part + s * state_floats(rows, width), rows, width);
        };
        for (int64_t s = 1; s < whole.end_segment - whole.first_segment; ++s) merge(state(0), state(s), rows, width);
        finish(shape, whole, state(0), sinks, out);
    };
    team.share(plan.merges.size(), run_merge);
}
