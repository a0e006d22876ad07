// A 128-bit digest of bytes, for accidents: a flipped bit, a lost write, a page taken for another.
//
// Not a cryptographic hash and not a defence against somebody who can write memory. Design: the folded 64 x 64 -> 128 bit multiply that
// wyhash and XXH3 use; 64-byte blocks go through four lanes, each block's halves into two different lanes, so that every input byte
// reaches both halves of the result. The same bytes give the same digest on every machine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvseal {

struct Digest {
    uint64_t low, high;
};

namespace digest_detail {
constexpr uint64_t K0 = 0xA0761D6478BD642FULL, K1 = 0xE7037ED1A0B428DBULL, K2 = 0x8EBC6AF09C88C6E3ULL, K3 = 0x589965CC75374CC3ULL;

inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}
}  // namespace digest_detail

// What the four lanes come to after `bytes` bytes.
inline Digest digest_end(uint64_t a, uint64_t b, uint64_t c, uint64_t d, size_t bytes) {
    using namespace digest_detail;
    const uint64_t length = static_cast<uint64_t>(bytes);
    Digest out;
    out.low = fold(a ^ K0 ^ length, c ^ K1) ^ fold(b ^ K2, d ^ K3);
    out.high = fold(a ^ K3, b ^ K2 ^ length) ^ fold(c ^ K1, d ^ K0);
    if ((out.low | out.high) == 0) out.low = 1;  // a zero digest means "not sealed"
    return out;
}

// `bytes` is a multiple of 64 (runs are padded to it).
inline Digest digest_of(const uint8_t* data, size_t bytes, uint64_t seed) {
    using namespace digest_detail;
    uint64_t a = seed ^ K0, b = seed ^ K1, c = seed ^ K2, d = seed ^ K3;
    for (size_t i = 0; i < bytes; i += 64) {
        uint64_t w[8];
        std::memcpy(w, data + i, 64);
        const uint64_t a0 = a, c0 = c;
        a = fold(w[0] ^ K1, w[1] ^ a) + b;
        c = fold(w[2] ^ K2, w[3] ^ c) + d;
        b = fold(w[4] ^ K3, w[5] ^ b) + c0;
        d = fold(w[6] ^ K0, w[7] ^ d) + a0;
    }
    return digest_end(a, b, c, d, bytes);
}

}  // namespace kvseal
