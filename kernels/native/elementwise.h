// The small operations between linear layers; see elementwise.cpp.
#pragma once

#include "vec.h"

// One token each, so callers share tokens among threads as they like.

// y = x / rms(x) * weight; with `residual`, it becomes residual + x first and that sum is what is normalised.
template <typename T>
void rms_norm_row(const T* x, T* residual, const T* weight, float eps, int64_t width, T* y);

// y = silu(gate) * up
template <typename T>
void silu_mul_row(const T* gate, const T* up, int64_t width, T* y);

// Turns one head in place: halves a, b become a cos - b sin, b cos + a sin (cos and sin repeat after half the width).
template <typename T>
void rotate_head(T* head, const T* cos, const T* sin, int64_t rotary_width);
