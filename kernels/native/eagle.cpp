// A feature draft's head: one Llama layer that reads (embedding of a token, feature of the position before it).
//
// Three calls: `fuse` turns a target's residual streams into features, `keep` writes their keys and values, and `draft`
// makes several tokens a row, one after the other, in one team of threads: no host work between them. Position t holds
// the pair (token t, feature t - 1), so position 0 is never read; a pair is turned as position t - 1 was in training.
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "rows.h"
#include "scratch.h"

using namespace vec;

namespace {

struct Shape {  // the order of fields is that of the numbers in eagle_forward/kernel.py
    int64_t width, feature_width, num_feature_norms, H, G, D, mlp, V, draft_V, rotary_width, num_positions, block_size,
        embedding_dtype, cache_dtype, window, is_residual_normed, is_feedback_normed, may_tile;
};

struct Weights {  // likewise; pointers, null where the head has none
    struct Panels {
        const void* data;
        int64_t dtype;
    } fc, q, kv, out, gate_up, down, head;
    const float *fc_bias, *q_bias, *kv_bias, *out_bias;
    const float *feature_norm, *token_norm, *hidden_norm, *q_norm, *k_norm, *post_norm, *norm, *cos, *sin;
    const void* embedding;
    const int64_t* target_ids;  // of the draft vocabulary
};

struct Step {  // likewise
    int64_t num_rows, table_stride, depth;
    const int64_t *token_ids, *positions, *slots;  // slots: of `keep`; `draft` finds its own
    const float* features;                         // [rows, width]
    void *k_cache, *v_cache;
    const int32_t* block_tables;  // [rows, table_stride]
    const int64_t* num_active;    // [depth] how many rows make that draft; the first ones
    int64_t* out_ids;             // [rows, depth]
    float *confidences, *logits, *out_features;  // [rows, depth]; of the last draft: [rows, draft_V] or null, [rows, width]
};

class Head {
  public:
    Head(const Shape& s, const Weights& w, const Step& now, float e, float scale) : shape(s), weights(w), step(now), eps(e) {
        q_width = s.H * s.D, kv_width = 2 * s.G * s.D;
        attention = {s.H, s.G, s.D, s.D, s.block_size, now.table_stride, s.window, scale, 0.0f, FLOAT32, s.cache_dtype,
                     FLOAT32, s.may_tile};
        attention.first_key = 1;
    }

    int64_t linear_work() const {
        return shape.width * (2 * (q_width + kv_width) + q_width + 3 * shape.mlp + shape.draft_V);
    }

    void plan(int64_t num_threads) {  // every draft sees one key more
        plans.resize(step.depth);
        std::vector<int32_t> lens(step.num_rows), bounds(step.num_rows + 1);
        for (int64_t r = 0; r <= step.num_rows; ++r) bounds[r] = r;
        for (int64_t s = 0; s < step.depth; ++s) {
            for (int64_t r = 0; r < step.num_rows; ++r) lens[r] = step.positions[r] + s + 1;
            plan_attention(attention, lens.data(), bounds.data(), step.num_active[s], num_threads, plans[s]);
            parts_floats = std::max(parts_floats, plans[s].part_floats);
        }
    }

    void take_scratch(bool is_draft) {
        const int64_t n = step.num_rows, widest = std::max({2 * shape.width, q_width, shape.mlp});
        const int64_t inputs = Activations::floats(n, widest);
        const int64_t sizes[] = {n * 2 * shape.width,  // hidden, embedded
                                 n * kv_width, is_draft * n * 2 * q_width, (1 + is_draft) * inputs,
                                 is_draft * n * shape.draft_V, parts_floats, 2 * n};
        int64_t total = 64 * 10;
        for (int64_t size : sizes) total += size;
        float* at = call_scratch(total);
        auto take = [&](int64_t floats) { return (at += (floats + 15) / 16 * 16) - (floats + 15) / 16 * 16; };
        hidden = take(n * shape.width), embedded = take(n * shape.width), kv = take(n * kv_width), x = take(inputs);
        tokens = (int64_t*)take(2 * n);
        if (is_draft) {
            q = take(n * q_width), mixed = take(n * q_width), gated = take(inputs);
            logits = take(n * shape.draft_V), parts = take(parts_floats);
        }
    }

    void keep_all(Team& team) {
        const int64_t n = step.num_rows;
        const Activations pairs(x, n, 2 * shape.width, weights.kv.dtype);
        share_tokens(team, pairs, [&](int64_t r) {
            tokens[r] = step.token_ids[r];
            std::memcpy(hidden + r * shape.width, step.features + r * shape.width, shape.width * sizeof(float));
            put_pair(pairs, r);
        });
        linear_team(team, linear(weights.kv, weights.kv_bias, kv_width, 2 * shape.width), pairs, {Destination::FLOAT, kv});
        team.share(n, [&](int64_t r) { keep_pair(r, step.positions[r], step.slots[r]); });
    }

    void draft_all(Team& team) {
        team.share(step.num_rows, [&](int64_t r) {
            tokens[r] = step.token_ids[r];
            std::memcpy(hidden + r * shape.width, step.features + r * shape.width, shape.width * sizeof(float));
            for (int64_t s = 0; s < step.depth; ++s) step.out_ids[r * step.depth + s] = -1;
        });
        for (int64_t s = 0; s < step.depth; ++s) draft(team, s);
        team.share(step.num_rows, [&](int64_t r) {
            std::memcpy(step.out_features + r * shape.width, hidden + r * shape.width, shape.width * sizeof(float));
        });
    }

  private:
    static Linear linear(const Weights::Panels& panels, const float* bias, int64_t N, int64_t K) {
        return {panels.data, bias, N, K, panels.dtype};
    }

    // One more token for the first n rows.
    void draft(Team& team, int64_t s) {
        const int64_t n = step.num_active[s], width = shape.width;
        const Activations pairs(x, n, 2 * width, weights.q.dtype), attended(x, n, q_width, weights.out.dtype);
        const Activations narrow(x, n, width, weights.gate_up.dtype), last(x, n, width, weights.head.dtype);
        const Activations gates(gated, n, shape.mlp, weights.down.dtype);
        share_tokens(team, pairs, [&](int64_t r) { put_pair(pairs, r); });
        linear_team(team, linear(weights.q, weights.q_bias, q_width, 2 * width), pairs, {Destination::FLOAT, q});
        linear_team(team, linear(weights.kv, weights.kv_bias, kv_width, 2 * width), pairs, {Destination::FLOAT, kv});
        team.share(n, [&](int64_t r) {
            const int64_t t = step.positions[r] + s;
            turn(q + r * q_width, shape.H, weights.q_norm, t);
            const int32_t* table = step.block_tables + r * step.table_stride;
            keep_pair(r, t, table[t / shape.block_size] * shape.block_size + t % shape.block_size);
        });
        attention_team(team, attention, plans[s], q, step.k_cache, step.v_cache, step.block_tables, nullptr, mixed, parts);
        pack_team(team, mixed, FLOAT32, attended);
        linear_team(team, linear(weights.out, weights.out_bias, width, q_width), attended, {Destination::ADD, hidden});
        share_tokens(team, narrow, [&](int64_t r) { norm_into(hidden + r * width, weights.post_norm, eps, narrow, r); });
        const int64_t gate_up_width = (shape.mlp + W - 1) / W * PANEL;
        linear_team(team, linear(weights.gate_up, nullptr, gate_up_width, width), narrow,
                    {Destination::GATE, nullptr, &gates});
        linear_team(team, linear(weights.down, nullptr, width, shape.mlp), gates, {Destination::ADD, hidden});
        share_tokens(team, last, [&](int64_t r) {
            if (shape.is_feedback_normed) norm_head(hidden + r * width, weights.norm, eps, width);
            if (!shape.is_feedback_normed) return norm_into(hidden + r * width, weights.norm, eps, last, r);
            const Activations::Column column = last.column(r);
            for (int64_t d = 0; d < width; d += W) column.put(d, load_first(hidden + r * width + d, width - d), width - d);
        });
        float* scores = step.logits ? step.logits : logits;
        linear_team(team, linear(weights.head, nullptr, shape.draft_V, width), last, {Destination::FLOAT, scores});
        team.share(n, [&](int64_t r) { choose(scores + r * shape.draft_V, r, s); });
    }

    // [norm of the embedding; norm of the feature], and the feature becomes what attention is added to.
    void put_pair(const Activations& pairs, int64_t r) {
        float *e = embedded + r * shape.width, *feature = hidden + r * shape.width;
        const int64_t at = tokens[r] * shape.width;
        for (int64_t d = 0; d < shape.width; d += W) {
            const int64_t n = shape.width - d;
            store_first(e + d, shape.embedding_dtype == BFLOAT16 ? load_first((const bf16*)weights.embedding + at + d, n)
                                                                  : load_first((const float*)weights.embedding + at + d, n),
                        n);
        }
        const Activations::Column column = pairs.column(r);
        norm_part(e, weights.token_norm, eps, shape.width, column, 0);
        norm_part(feature, weights.hidden_norm, eps, shape.width, column, shape.width);
        if (shape.is_residual_normed) norm_head(feature, weights.hidden_norm, eps, shape.width);
    }

    void turn(float* heads, int64_t count, const float* norm, int64_t position) {
        const int64_t at = (position - 1) * shape.rotary_width;
        for (int64_t h = 0; h < count; ++h) {
            if (norm) norm_head(heads + h * shape.D, norm, eps, shape.D);
            rotate_head(heads + h * shape.D, weights.cos + at, weights.sin + at, shape.rotary_width);
        }
    }

    void keep_pair(int64_t r, int64_t position, int64_t slot) {
        const int64_t width = shape.G * shape.D;
        float *k = kv + r * kv_width, *v = k + width;
        turn(k, shape.G, weights.k_norm, position);
        auto keep_row = shape.cache_dtype == BFLOAT16 ? keep<bf16> : keep<float>;
        keep_row(k, width, step.k_cache, slot);
        keep_row(v, width, step.v_cache, slot);
    }

    // The likeliest token, the lowest of equals, and its probability.
    void choose(const float* scores, int64_t r, int64_t s) {
        F top = splat(-std::numeric_limits<float>::infinity());
        const int64_t whole = shape.draft_V / W * W;
        for (int64_t v = 0; v < whole; v += W) top = vec::max(top, load(scores + v));
        float best = max_lane(top);
        for (int64_t v = whole; v < shape.draft_V; ++v) best = std::max(best, scores[v]);
        int64_t chosen = 0;
        while (chosen < shape.draft_V - 1 && scores[chosen] != best) ++chosen;
        F total = F{};
        for (int64_t v = 0; v < whole; v += W) total = total + vec::exp(load(scores + v) - best);
        float sum_of_weights = sum(total);
        for (int64_t v = whole; v < shape.draft_V; ++v) sum_of_weights += exp_scalar(scores[v] - best);
        const float share = 1.0f / sum_of_weights;
        tokens[r] = weights.target_ids[chosen];
        step.out_ids[r * step.depth + s] = tokens[r];
        step.confidences[r * step.depth + s] = share > 0 && share <= 1 ? share : 0;
    }

    const Shape& shape;
    const Weights& weights;
    const Step& step;
    const float eps;
    AttentionShape attention;
    std::vector<AttentionPlan> plans;  // one a draft
    int64_t q_width, kv_width, parts_floats = 0;
    int64_t* tokens;
    float *hidden, *embedded, *kv, *x, *q, *mixed, *gated, *logits, *parts;
};

bool is_out_of_range(const Shape& shape, const Step& step, int64_t depth) {
    for (int64_t r = 0; r < step.num_rows; ++r)
        if (step.token_ids[r] < 0 || step.token_ids[r] >= shape.V || step.positions[r] < 1 ||
            step.positions[r] + depth - 1 > shape.num_positions)
            return true;
    return false;
}

}  // namespace

extern "C" {

// features [T, feature_width] -> out [T, width]
void specdec_eagle_fuse(const void* shape_numbers, const void* weight_numbers, const float* features, float* out, int64_t T,
                        float eps, int64_t num_threads) {
    const Shape& shape = *(const Shape*)shape_numbers;
    const Weights& weights = *(const Weights*)weight_numbers;
    const int64_t K = shape.feature_width, parts = shape.num_feature_norms;
    const Activations x(call_scratch(Activations::floats(T, K)), T, K, weights.fc.dtype);
    const Linear fc{weights.fc.data, weights.fc_bias, shape.width, K, weights.fc.dtype};
    Team::run(worthwhile_threads(K * shape.width * (T + 3) / 4, num_threads), [&](Team& team) {
        if (parts)
            team.share(T, [&](int64_t t) {
                for (int64_t p = 0; p < parts; ++p)
                    norm_part(features + t * K + p * (K / parts), weights.feature_norm + p * (K / parts), eps, K / parts,
                              x.column(t), p * (K / parts));
            });
        else
            pack_team(team, features, FLOAT32, x);
        linear_team(team, fc, x, {Destination::FLOAT, out});
    });
}

int64_t specdec_eagle_keep(const void* shape_numbers, const void* weight_numbers, const void* step_numbers, float eps,
                           float scale, int64_t num_threads) {
    const Shape& shape = *(const Shape*)shape_numbers;
    const Step& step = *(const Step*)step_numbers;
    if (is_out_of_range(shape, step, 1)) return 1;
    Head head(shape, *(const Weights*)weight_numbers, step, eps, scale);
    head.take_scratch(false);
    const int64_t work = shape.width * 4 * shape.G * shape.D * (step.num_rows + 3) / 4;
    Team::run(worthwhile_threads(work, num_threads), [&](Team& team) { head.keep_all(team); });
    return 0;
}

int64_t specdec_eagle_draft(const void* shape_numbers, const void* weight_numbers, const void* step_numbers, float eps,
                            float scale, int64_t num_threads) {
    const Shape& shape = *(const Shape*)shape_numbers;
    const Step& step = *(const Step*)step_numbers;
    if (is_out_of_range(shape, step, step.depth)) return 1;
    Head head(shape, *(const Weights*)weight_numbers, step, eps, scale);
    num_threads = worthwhile_threads(head.linear_work() * (step.num_rows + 3) / 16, num_threads);
    head.plan(num_threads);
    head.take_scratch(true);
    Team::run(num_threads, [&](Team& team) { head.draft_all(team); });
    return 0;
}
}
