// One step of a Llama-like decoder in one call: all layers inside one team of threads, activations in float.
//
// Between barriers, threads share tokens (norms, rotations), panels of weights (linear layers) or rows and segments
// (attention). Nothing a token goes through depends on which thread takes it or what else is in the step.
#include "attention.h"
#include "bytes.h"
#include "elementwise.h"
#include "linear.h"
#include "rows.h"
#include "scratch.h"

#include <chrono>

using namespace vec;

namespace {

struct Shape {  // the order of fields is that of the numbers in llama_forward/kernel.py
    int64_t num_layers, width, H, G, D, mlp, V, rotary_width, num_positions, block_size, embedding_dtype, head_dtype,
        cache_dtype, may_tile;
};

struct Layer {  // likewise; pointers
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    struct Weights {
        const void* data;
        int64_t dtype;
    } qkv, out, gate_up, down;
    const float *qkv_bias, *out_bias;
    int64_t window;
};

struct Step {  // likewise
    int64_t num_tokens, num_rows, num_logits, table_stride, num_features;
    const int64_t *token_ids, *positions, *slots, *logits_indices, *feature_layers;
    const int32_t *block_tables, *seq_lens, *cu_query_lens;
    float *logits, *features;
    const float* inputs;  // embeddings in place of token_ids, or null
    double* seconds;      // [NUM_STAGES], added to by the first thread; or null
};

enum Stage { ELEMENTWISE, LINEARS, ATTENTION, HEAD, NUM_STAGES };  // STAGES in llama_forward/kernel.py

struct Model {
    Shape shape;
    const Layer* layers;
    const float *norm, *cos, *sin;  // cos and sin: [positions, rotary_width]
    const void* embedding;          // null: rows of the head are unpacked
    const void* head;
    void* const* caches;            // key cache and value cache of every layer
    float eps, scale;

    Linear head_linear() const { return {head, nullptr, shape.V, shape.width, shape.head_dtype}; }
};

class Forward {
  public:
    Forward(const Model& m, const Step& s, int64_t num_threads) : model(m), step(s), shape(m.shape) {
        attention = {shape.H, shape.G, shape.D, shape.D, shape.block_size, s.table_stride, 0, m.scale, 0.0f,
                     FLOAT32, shape.cache_dtype, FLOAT32, shape.may_tile};
        qkv_width = (shape.H + 2 * shape.G) * shape.D;
        out_width = shape.H * shape.D;
        // Layers see all of the context or a window of it; each kind is cut once a step.
        for (int64_t i = 0; i < shape.num_layers; ++i) {
            size_t kind = 0;
            while (kind < windows.size() && windows[kind] != m.layers[i].window) ++kind;
            if (kind == windows.size()) windows.push_back(m.layers[i].window);
        }
        plans.resize(windows.size());
        int64_t parts_floats = 0;
        for (size_t kind = 0; kind < windows.size(); ++kind) {
            attention.window = windows[kind];
            plan_attention(attention, s.seq_lens, s.cu_query_lens, s.num_rows, num_threads, plans[kind]);
            parts_floats = std::max(parts_floats, plans[kind].part_floats);
        }
        const int64_t T = s.num_tokens, rows = std::max(T, s.num_logits);
        const int64_t widest = std::max({shape.width, out_width, shape.mlp});
        const int64_t inputs = Activations::floats(rows, widest);
        float* at = call_scratch(T * (shape.width + qkv_width + out_width) + 2 * inputs + parts_floats +
                                 ByteActivations::floats(rows, widest) + 64 * 7);
        auto take = [&](int64_t floats) { return (at += (floats + 15) / 16 * 16) - (floats + 15) / 16 * 16; };
        hidden = take(T * shape.width), qkv = take(T * qkv_width), mixed = take(T * out_width);
        first = take(inputs), second = take(inputs), parts = take(parts_floats);
        bytes = take(ByteActivations::floats(rows, widest));
    }

    void run(Team& team) {
        const int64_t T = step.num_tokens;
        if (Team::thread() == 0) now = Clock::now();
        team.share(T, [&](int64_t t) { embed(t); });
        for (int64_t i = 0; i < shape.num_layers; ++i) run_layer(team, i);
        team.share(T, [&](int64_t t) { keep_feature(shape.num_layers, t); });
        const Activations last(first, step.num_logits, shape.width, shape.head_dtype);
        share_tokens(team, last, [&](int64_t i) {
            norm_into(hidden + step.logits_indices[i] * shape.width, model.norm, model.eps, last, i);
        });
        mark(ELEMENTWISE);
        linear_team(team, model.head_linear(), last, {Destination::FLOAT, step.logits}, bytes);
        mark(HEAD);
    }

  private:
    using Clock = std::chrono::steady_clock;

    // The time since the last mark went into `stage`.
    void mark(Stage stage) {
        if (!step.seconds || Team::thread() != 0) return;
        const Clock::time_point then = now;
        now = Clock::now();
        step.seconds[stage] += std::chrono::duration<double>(now - then).count();
    }

    void run_layer(Team& team, int64_t index) {
        const Layer& layer = model.layers[index];
        const int64_t T = step.num_tokens;
        const Activations x(first, T, shape.width, layer.qkv.dtype);
        const Activations attended(first, T, out_width, layer.out.dtype);
        const Activations y(first, T, shape.width, layer.gate_up.dtype);
        const Activations gated(second, T, shape.mlp, layer.down.dtype);
        share_tokens(team, x, [&](int64_t t) {
            keep_feature(index, t);
            norm_into(hidden + t * shape.width, layer.input_norm, model.eps, x, t);
        });
        auto linear = [](const Layer::Weights& weights, const float* bias, int64_t N, int64_t K) {
            return Linear{weights.data, bias, N, K, weights.dtype};
        };
        mark(ELEMENTWISE);
        linear_team(team, linear(layer.qkv, layer.qkv_bias, qkv_width, shape.width), x, {Destination::FLOAT, qkv}, bytes);
        mark(LINEARS);
        team.share(T, [&](int64_t t) { turn_and_keep(layer, index, t); });
        mark(ELEMENTWISE);
        attend(team, layer, index);
        mark(ATTENTION);
        pack_team(team, mixed, FLOAT32, attended);
        linear_team(team, linear(layer.out, layer.out_bias, shape.width, out_width), attended,
                    {Destination::ADD, hidden}, bytes);
        mark(LINEARS);
        share_tokens(team, y, [&](int64_t t) { norm_into(hidden + t * shape.width, layer.post_norm, model.eps, y, t); });
        mark(ELEMENTWISE);
        const int64_t gate_up_width = (shape.mlp + W - 1) / W * PANEL;
        linear_team(team, linear(layer.gate_up, nullptr, gate_up_width, shape.width), y,
                    {Destination::GATE, nullptr, &gated}, bytes);
        linear_team(team, linear(layer.down, nullptr, shape.width, shape.mlp), gated, {Destination::ADD, hidden},
                    bytes);
        mark(LINEARS);
    }

    void embed(int64_t t) {
        float* to = hidden + t * shape.width;
        if (step.inputs)
            std::memcpy(to, step.inputs + t * shape.width, shape.width * sizeof(float));
        else if (!model.embedding)
            unpack_row(model.head_linear(), step.token_ids[t], to);
        else
            for (int64_t d = 0, at = step.token_ids[t] * shape.width; d < shape.width; ++d)
                to[d] = shape.embedding_dtype == BFLOAT16 ? to_float(((const bf16*)model.embedding)[at + d])
                                                       : ((const float*)model.embedding)[at + d];
    }

    void keep_feature(int64_t layer, int64_t t) {
        for (int64_t f = 0; f < step.num_features; ++f)
            if (step.feature_layers[f] == layer)
                std::memcpy(step.features + (t * step.num_features + f) * shape.width, hidden + t * shape.width,
                            shape.width * sizeof(float));
    }

    // Norms of heads where the model has them, rotation, and this token's place in the cache.
    void turn_and_keep(const Layer& layer, int64_t index, int64_t t) {
        float* q = qkv + t * qkv_width;
        float *k = q + out_width, *v = k + shape.G * shape.D;
        const int64_t at = step.positions[t] * shape.rotary_width;
        for (int64_t h = 0; h < shape.H + shape.G; ++h) {
            float* head = q + h * shape.D;
            if (layer.q_norm) norm_head(head, h < shape.H ? layer.q_norm : layer.k_norm, model.eps, shape.D);
            rotate_head(head, model.cos + at, model.sin + at, shape.rotary_width);
        }
        if (step.slots[t] < 0) return;
        auto keep_row = shape.cache_dtype == BFLOAT16 ? keep<bf16> : keep<float>;
        keep_row(k, shape.G * shape.D, model.caches[2 * index], step.slots[t]);
        keep_row(v, shape.G * shape.D, model.caches[2 * index + 1], step.slots[t]);
    }

    void attend(Team& team, const Layer& layer, int64_t index) {
        const size_t kind = std::find(windows.begin(), windows.end(), layer.window) - windows.begin();
        AttentionShape of_layer = attention;
        of_layer.window = layer.window;
        of_layer.q_stride = qkv_width;
        attention_team(team, of_layer, plans[kind], qkv, model.caches[2 * index], model.caches[2 * index + 1],
                       step.block_tables, nullptr, mixed, parts);
    }

    const Model& model;
    const Step& step;
    const Shape& shape;
    AttentionShape attention;
    std::vector<int64_t> windows;
    std::vector<AttentionPlan> plans;  // one a window
    int64_t qkv_width, out_width;
    float *hidden, *qkv, *mixed, *first, *second, *parts, *bytes;
    Clock::time_point now;  // of the first thread
};

bool is_out_of_range(const Shape& shape, const Step& step) {
    auto any = [](const int64_t* values, int64_t count, int64_t limit) {
        return std::any_of(values, values + count, [=](int64_t value) { return value < 0 || value >= limit; });
    };
    return (!step.inputs && any(step.token_ids, step.num_tokens, shape.V)) ||
           any(step.positions, step.num_tokens, shape.num_positions) ||
           any(step.logits_indices, step.num_logits, step.num_tokens);
}

}  // namespace

extern "C" int64_t specdec_llama_forward(const void* shape, const void* layers, const float* norm, const float* cos,
                                         const float* sin, const void* embedding, const void* head,
                                         void* const* caches,
                                         const void* step, float eps, float scale, int64_t num_threads) {
    const Model model{*(const Shape*)shape, (const Layer*)layers, norm, cos, sin, embedding, head, caches, eps, scale};
    const Shape& s = model.shape;
    const int64_t layer_weights = s.width * ((2 * s.H + 2 * s.G) * s.D + 3 * s.mlp);
    const Step& now = *(const Step*)step;
    if (is_out_of_range(s, now)) return 1;
    // A weight is worth four multiplications to read, and the many barriers of a step want more work than one does.
    num_threads = worthwhile_threads(s.num_layers * layer_weights * (now.num_tokens + 3) / 16, num_threads);
    Forward forward(model, now, num_threads);
    Team::run(num_threads, [&](Team& team) { forward.run(team); });
    return 0;
}
