// The products of tiles.h, and asking the system for the registers they need.
#include "tiles.h"

#include "groups.h"

#if SPECDEC_HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

using vec::bf16;

namespace {

constexpr int64_t FETCH_AHEAD = 4 * tiles::SIZE;  // numbers of weights, which are read once from memory
constexpr int64_t CODES_AHEAD = 4096;             // bytes, likewise
constexpr int64_t TILE_BYTES = 64;                // of a row
constexpr int64_t PANEL_BYTES = 2 * 16 * sizeof(float);  // of a row of sums

bool ask() {
    unsigned a, b, c, d;
    const unsigned wanted = 1u << 22 | 1u << 24;  // AMX-BF16 and AMX-TILE
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return false;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, of the whole process
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

struct Configurations {
    Configuration of[tiles::ROWS + 1];
    constexpr Configurations() : of() {
        for (int rows = 0; rows <= tiles::ROWS; ++rows)
            for (int i = 0; i < 8; ++i) of[rows].row_bytes[i] = TILE_BYTES, of[rows].rows[i] = i < 6 ? rows : tiles::ROWS;
    }
};

// Constants in memory: GCC believes that _tile_loadconfig reads eight bytes, and drops stores to the others.
constinit const Configurations CONFIGURATIONS;

// Registers: 0-3 sums (of 16 tokens x 16 outputs), 4-5 inputs, 6-7 weights.
template <int BLOCKS>
void multiply_blocks(const bf16* panel, const bf16* inputs, int64_t steps, float* sums) {
    tiles::order_memory();
    _tile_zero(0);
    _tile_zero(1);
    if (BLOCKS == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const bf16* second = inputs + steps * tiles::SIZE;
    for (int64_t s = 0; s < steps; ++s, panel += 2 * tiles::SIZE) {
        _tile_loadd(6, panel, TILE_BYTES);
        _tile_loadd(4, inputs + s * tiles::SIZE, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + tiles::SIZE, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (BLOCKS == 2) {
            _tile_loadd(5, second + s * tiles::SIZE, TILE_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int64_t at = 0; at < 2 * tiles::SIZE; at += 32) __builtin_prefetch(panel + FETCH_AHEAD + at);
    }
    _tile_stored(0, sums, PANEL_BYTES);
    _tile_stored(1, sums + 16, PANEL_BYTES);
    if (BLOCKS == 2) {
        _tile_stored(2, sums + tiles::ROWS * 32, PANEL_BYTES);
        _tile_stored(3, sums + tiles::ROWS * 32 + 16, PANEL_BYTES);
    }
}

// 16 rows of 32 codes -> bfloat16
SPECDEC_INLINE void widen(const uint8_t* codes, bf16* to) {
    auto floats = [](const uint8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
    };
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i, codes += 32, to += 32) {
        const __m512bh row = _mm512_cvtne2ps_pbh(floats(codes + 16), floats(codes));
        std::memcpy(to, &row, sizeof row);
    }
}

template <int BLOCKS>
void multiply_code_blocks(const uint8_t* panel, const bf16* inputs, int64_t num_tokens, int64_t steps, float* sums) {
    using namespace vec;
    alignas(64) bf16 weights[2][2 * tiles::SIZE];  // in turns, so that one step need not wait for the other's reads
    alignas(64) float products[BLOCKS * tiles::ROWS * 32];
    const bf16* second = inputs + steps * tiles::SIZE;
    std::fill(sums, sums + num_tokens * 32, 0.0f);
    for (int64_t s = 0; s < steps; ++s, panel += groups::BYTES_8) {
        bf16* wide = weights[s % 2];
        widen(panel + groups::HALVES, wide);
        widen(panel + groups::HALVES + tiles::SIZE, wide + tiles::SIZE);
        for (int64_t at = 0; at < groups::BYTES_8; at += 64) __builtin_prefetch(panel + CODES_AHEAD + at);
        tiles::order_memory();
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, inputs + s * tiles::SIZE, TILE_BYTES);
        _tile_loadd(6, wide, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, wide + tiles::SIZE, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (BLOCKS == 2) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(5, second + s * tiles::SIZE, TILE_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_stored(2, products + tiles::ROWS * 32, PANEL_BYTES);
            _tile_stored(3, products + tiles::ROWS * 32 + 16, PANEL_BYTES);
        }
        _tile_stored(0, products, PANEL_BYTES);
        _tile_stored(1, products + 16, PANEL_BYTES);
        const F d0 = groups::load_halves(panel), d1 = groups::load_halves(panel + 2 * W);
        for (int64_t at = 0; at < num_tokens * 32; at += 32) {
            store(sums + at, fma(d0, load(products + at), load(sums + at)));
            store(sums + at + W, fma(d1, load(products + at + W), load(sums + at + W)));
        }
    }
}

}  // namespace

bool tiles::available() {
    static const bool may = ask();
    return may;
}

void tiles::enter(int64_t rows) { _tile_loadconfig(&CONFIGURATIONS.of[rows]); }

void tiles::leave() { _tile_release(); }

void tiles::multiply(const bf16* panel, const bf16* inputs, int64_t num_tokens, int64_t K, float* sums) {
    if (num_tokens > ROWS)
        multiply_blocks<2>(panel, inputs, steps(K), sums);
    else
        multiply_blocks<1>(panel, inputs, steps(K), sums);
}

void tiles::multiply_codes(const uint8_t* panel, const bf16* inputs, int64_t num_tokens, int64_t K, float* sums) {
    if (num_tokens > ROWS)
        multiply_code_blocks<2>(panel, inputs, num_tokens, steps(K), sums);
    else
        multiply_code_blocks<1>(panel, inputs, num_tokens, steps(K), sums);
}

#else

bool tiles::available() { return false; }
void tiles::enter(int64_t) {}
void tiles::leave() {}
void tiles::multiply(const vec::bf16*, const vec::bf16*, int64_t, int64_t, float*) {}
void tiles::multiply_codes(const uint8_t*, const vec::bf16*, int64_t, int64_t, float*) {}

#endif

extern "C" int64_t specdec_has_tiles() { return tiles::available(); }
