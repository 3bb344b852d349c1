// Writing keys or values into the paged cache; see write_kv.cpp.
#pragma once

#include <cstdint>

#include "team.h"

struct KVRows {
    const char* data;  // [T, G, D], strides in bytes
    char* cache;       // [num_slots, G, D]
    int64_t bytes;     // of one D
    int64_t token_stride, group_stride;
};

// Called by every thread of the team. A negative slot is skipped.
void write_kv_team(Team& team, const KVRows& rows, const int64_t* slots, int64_t num_tokens, int64_t groups);
