// Pages that came from another node: the proof, in the receiver's own memory, that each is what was announced.
//
// Owns the comparison of a foreign seal (nonce as the sender announced it, scope, ordinal, layer, full, format) with what stands in memory,
// the digest recomputed over the bytes that stand there, and the change of nonce that makes such a page ours. Laws L3-L7, L9, L10. Until
// `restamp` a page bears its sender's nonce, so that no kernel here reads it.
#pragma once
#include <cstring>

#include "digest.h"
#include "layout.h"

namespace kvseal {

// Numbers shared with kvseal/handoff/proof.py; those of SealCheck keep their meaning.
enum PageCheck : int32_t { PAGE_CLEAN = 0, PAGE_DIGEST = 11, PAGE_FOLD = 12 };

struct PageClaim {
    uint64_t nonce;
    uint64_t scope[2];
    uint32_t ordinal;
    const uint8_t* fold;  // 16 bytes
};

struct PageBreak {
    int32_t check;  // PAGE_CLEAN: none
    int layer;
};

struct Fold {
    uint64_t low = 0x9E3779B97F4A7C15ULL, high = 0xD1B54A32D192ED03ULL;  // as Decoder::seal_digests folds a page

    void add(int layer, uint64_t digest_low, uint64_t digest_high) {
        using namespace digest_detail;
        low = fold(low ^ digest_low, K0 ^ static_cast<uint64_t>(layer)) + digest_high;
        high = fold(high ^ digest_high, K1 ^ static_cast<uint64_t>(layer)) + digest_low;
    }
    bool equals(const uint8_t* bytes) const { return std::memcmp(bytes, &low, 8) == 0 && std::memcmp(bytes + 8, &high, 8) == 0; }
};

// One layer of one page as it stands in memory; adds its digest to the fold.
static inline int32_t check_section(const KVLayout& kv, int64_t page, int layer, const PageClaim& claim, bool recompute, Fold& fold) {
    const Seal* seal = kv.seal(page, layer);
    const Expected want{claim.nonce, {claim.scope[0], claim.scope[1]}, kv.format, claim.ordinal, static_cast<uint16_t>(layer)};
    const SealCheck identity = check_identity(seal, want);
    if (identity != CLEAN) return identity;
    if (filled_slots(seal) != kv.page_tokens) return FILLED;
    if (recompute) {
        const Digest found = digest_of(kv.run(page, layer, false), static_cast<size_t>(2 * kv.run_bytes), kv.format);
        if (found.low != seal->digest[0] || found.high != seal->digest[1]) return PAGE_DIGEST;
    }
    fold.add(layer, seal->digest[0], seal->digest[1]);
    return PAGE_CLEAN;
}

// `source` (may be null) is copied into the page first, layer by layer; each is checked while it is in the nearest cache.
static inline PageBreak place_page(const KVLayout& kv, int64_t page, const uint8_t* source, const PageClaim& claim, bool recompute) {
    Fold fold;
    for (int layer = 0; layer < kv.layers; ++layer) {
        if (source != nullptr) std::memcpy(kv.section(page, layer), source + layer * kv.section_bytes, static_cast<size_t>(kv.section_bytes));
        const int32_t check = check_section(kv, page, layer, claim, recompute, fold);
        if (check != PAGE_CLEAN) return {check, layer};
    }
    return fold.equals(claim.fold) ? PageBreak{PAGE_CLEAN, 0} : PageBreak{PAGE_FOLD, kv.layers - 1};
}

// Gives a proven page our own nonce. Every line is compared once more before the first is written.
static inline PageBreak restamp_page(const KVLayout& kv, int64_t page, const PageClaim& claim, uint64_t nonce) {
    const PageBreak found = place_page(kv, page, nullptr, claim, false);
    if (found.check != PAGE_CLEAN) return found;
    for (int layer = 0; layer < kv.layers; ++layer) __atomic_store_n(&kv.seal(page, layer)->nonce, nonce, __ATOMIC_RELEASE);
    return {PAGE_CLEAN, 0};
}

}  // namespace kvseal
