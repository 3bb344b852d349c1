// Linear layers over weights packed in panels; see linear.cpp.
#pragma once

#include "team.h"
#include "vec.h"

constexpr int PANEL = 2 * vec::W;  // outputs a panel holds

struct Linear {
    const void* weights;  // [panels][K][PANEL], bfloat16 or float32
    const float* bias;    // [N] or null
    int64_t N, K;
    int64_t dtype;
};

int64_t linear_scratch(int64_t num_tokens, int64_t K);  // floats

// Called by every thread of the team. x [T, K], out [T, N]; scratch as above.
void linear_team(Team& team, const Linear& layer, const void* x, int64_t x_dtype, void* out, int64_t out_dtype, 
                 int64_t num_tokens, float* scratch);
