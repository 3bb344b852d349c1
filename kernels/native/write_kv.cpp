// Placing this step's keys and values in the paged cache: one copy of G * D numbers a token.
#include "write_kv.h"

#include <cstring>

namespace {

void copy_row(const char* from, int64_t group_stride, char* to, int64_t groups, int64_t bytes) {
    if (group_stride == bytes)
        std::memcpy(to, from, groups * bytes);
    else
        for (int64_t g = 0; g < groups; ++g) std::memcpy(to + g * bytes, from + g * group_stride, bytes);
}

}  // namespace

void write_kv_team(Team& team, const KVRows& rows, const int64_t* slots, int64_t num_tokens, int64_t groups) {
    auto copy_token = [&](int64_t t) {
        if (slots[t] < 0) return;
        copy_row(rows.data + t * rows.token_stride, rows.group_stride, rows.cache + slots[t] * groups * rows.bytes, groups,
                 rows.bytes);
    };
    team.share(num_tokens, copy_token, 16);
}

extern "C" void specdec_write_kv(const void* k, const void* v, const int64_t* slots, void* k_cache, void* v_cache,
                                 int64_t num_tokens, int64_t groups, int64_t k_bytes, int64_t v_bytes,
                                 int64_t k_token_stride, int64_t k_group_stride, int64_t v_token_stride,
                                 int64_t v_group_stride, int64_t num_threads) {
    KVRows keys{(const char*)k, (char*)k_cache, k_bytes, k_token_stride, k_group_stride};
    KVRows values{(const char*)v, (char*)v_cache, v_bytes, v_token_stride, v_group_stride};
    Team::run(worthwhile_threads(num_tokens * groups * (k_bytes + v_bytes), num_threads), [&](Team& team) {
        write_kv_team(team, keys, slots, num_tokens, groups);
        write_kv_team(team, values, slots, num_tokens, groups);
    });
}
