// What min_p leaves of a row, and the nucleus of that: the smallest set of likeliest ids whose mass reaches top_p, ties to
// the lower ids.
//
// Nothing is sorted but one bin. Masses are added up by bins of the score, which is monotone where the exponential's last
// bit need not be; the bin in which the nucleus ends is put in order. A row is one thread's, so its sums have one order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"
#include "vec.h"

using namespace vec;

namespace {

constexpr int64_t BINS = 4096;

SPECDEC_INLINE float wide(float x) { return x; }
SPECDEC_INLINE float wide(bf16 x) { return to_float(x); }
SPECDEC_INLINE double wide(double x) { return x; }

template <typename Value>
struct Scratch {  // of one thread
    std::vector<Value> weights;
    std::vector<double> mass = std::vector<double>(BINS);
    std::vector<std::pair<Value, int64_t>> members;
};

// The largest score; NaN where a score is NaN or +inf, for then the row cannot choose.
template <typename T>
float largest(const T* x, int64_t V) {
    const float infinity = std::numeric_limits<float>::infinity();
    F top = splat(-infinity);
    I bad = splat_int(0);
    int64_t v = 0;
    for (; v + W <= V; v += W) {
        F value = load(x + v);
        bad |= ~(value < splat(infinity));
        top = max(top, value);
    }
    float best = max_lane(top);
    bool is_bad = false;
    for (int i = 0; i < W; ++i) is_bad = is_bad || bad[i];
    for (; v < V; ++v) {
        is_bad = is_bad || !(wide(x[v]) < infinity);
        best = std::max(best, wide(x[v]));
    }
    return is_bad ? std::numeric_limits<float>::quiet_NaN() : best;
}

double largest(const double* x, int64_t V) {
    double best = -std::numeric_limits<double>::infinity();
    for (int64_t v = 0; v < V; ++v) {
        if (!(x[v] < std::numeric_limits<double>::infinity())) return std::numeric_limits<double>::quiet_NaN();
        best = std::max(best, x[v]);
    }
    return best;
}

// weights[v] = exp((x[v] - top) / temperature); returns their sum
double weigh(const float* x, int64_t V, float top, double temperature, float* weights) {
    constexpr int64_t STRETCH = 1024;  // floats hold so few sums well; doubles hold the sums of those
    const F shift = splat(top), scale = splat((float)temperature);
    double total = 0;
    for (int64_t from = 0; from < V; from += STRETCH) {
        F sums = F{};
        const int64_t to = std::min(V, from + STRETCH);
        for (int64_t v = from; v < to; v += W) {
            const int64_t count = std::min<int64_t>(W, to - v);
            F weight = vec::exp((load_first(x + v, count) - shift) / scale);
            for (int64_t i = count; i < W; ++i) weight[i] = 0;
            store_first(weights + v, weight, count);
            sums = sums + weight;
        }
        total += sum(sums);
    }
    return total;
}

double weigh(const double* x, int64_t V, double top, double temperature, double* weights) {
    double total = 0;
    for (int64_t v = 0; v < V; ++v) total += weights[v] = std::exp((x[v] - top) / temperature);
    return total;
}

struct Cut {  // kept: scores above `bound`, and those equal to it up to `last_id`
    double bound;
    int64_t last_id;
};

template <typename Value>
Cut find_cut(const Value* x, int64_t V, Value top, double temperature, double top_p, Scratch<Value>& scratch) {
    scratch.weights.resize(V);
    const double total = weigh(x, V, top, temperature, scratch.weights.data()), wanted = top_p * total;
    // Ids each lighter than (1 - top_p) / 2 V of the row weigh less than 1 - top_p together: none is needed.
    const double range = temperature * std::log(2.0 * V / ((1 - top_p) * total));
    const Value scale = (Value)(BINS / range), end = (Value)BINS;
    std::fill(scratch.mass.begin(), scratch.mass.end(), 0.0);
    auto distance = [&](int64_t v) { return (top - x[v]) * scale; };
    for (int64_t v = 0; v < V; ++v) {
        const Value d = distance(v);
        if (d < end) scratch.mass[(int64_t)d] += scratch.weights[v];
    }
    double above = 0;
    int64_t bin = 0;
    while (bin < BINS && above + scratch.mass[bin] < wanted) above += scratch.mass[bin++];
    if (bin == BINS) return {-std::numeric_limits<double>::max(), V};  // top_p is 1 up to rounding
    auto& members = scratch.members;
    members.clear();
    for (int64_t v = 0; v < V; ++v) {
        const Value d = distance(v);
        if (d < end && (int64_t)d == bin) members.emplace_back(x[v], v);
    }
    auto is_before = [](const auto& a, const auto& b) { return a.first > b.first; };
    if (!std::is_sorted(members.begin(), members.end(), is_before))
        std::stable_sort(members.begin(), members.end(), is_before);  // ids ascend, so equals keep that order
    for (const auto& [score, id] : members) {
        above += scratch.weights[id];
        if (above >= wanted) return {score, id};
    }
    return {members.back().first, members.back().second};
}

struct Limits {  // of all rows
    const double *temperatures, *top_p, *min_p;
};

template <typename T, typename Value>
void keep_row(const T* x, int64_t V, const Limits& limits, int64_t r, Scratch<Value>& scratch, Value* kept) {
    const double temperature = limits.temperatures[r], top_p = limits.top_p[r], min_p = limits.min_p[r];
    const Value top = largest(x, V), never = -std::numeric_limits<Value>::infinity();
    const bool can_choose = top > never;  // else whoever samples says so
    const Value floor = can_choose && min_p > 0 ? (Value)(top + temperature * std::log(min_p)) : never;
    if (floor > never)
        for (int64_t v = 0; v < V; ++v) kept[v] = wide(x[v]) >= floor ? wide(x[v]) : never;
    else
        for (int64_t v = 0; v < V; ++v) kept[v] = wide(x[v]);
    if (!can_choose || !(top_p < 1)) return;
    const Cut cut = find_cut(kept, V, top, temperature, top_p, scratch);
    const Value bound = (Value)cut.bound;
    const int64_t split = std::min(V, cut.last_id + 1);  // equals are kept before it
    for (int64_t v = 0; v < split; ++v) kept[v] = kept[v] >= bound ? kept[v] : never;
    for (int64_t v = split; v < V; ++v) kept[v] = kept[v] > bound ? kept[v] : never;
}

template <typename T, typename Value>
void nucleus(const T* x, const Limits& limits, Value* kept, int64_t num_rows, int64_t V, int64_t num_threads) {
    const int64_t most = std::max<int64_t>(1, std::min(num_threads, num_rows));
    Team::run(worthwhile_threads(num_rows * V * 40, most), [&](Team& team) {
        Scratch<Value> scratch;
        team.share(num_rows, [&](int64_t r) { keep_row(x + r * V, V, limits, r, scratch, kept + r * V); });
    });
}

}  // namespace

extern "C" void specdec_nucleus(const void* scores, const double* temperatures, const double* top_p, const double* min_p,
                                void* kept, int64_t num_rows, int64_t V, int64_t dtype, int64_t num_threads) {
    const Limits limits{temperatures, top_p, min_p};
    if (dtype == FLOAT32)
        nucleus((const float*)scores, limits, (float*)kept, num_rows, V, num_threads);
    else if (dtype == BFLOAT16)
        nucleus((const bf16*)scores, limits, (float*)kept, num_rows, V, num_threads);
    else
        nucleus((const double*)scores, limits, (double*)kept, num_rows, V, num_threads);
}
