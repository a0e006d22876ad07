// Pages that came from another node: the proof, in the receiver's own memory, that each is what was announced.
//
// Owns the comparison of a foreign seal (nonce as the sender announced it, scope, ordinal, layer, filled, format) with what stands in memory,
// the digest recomputed over the bytes that stand there, and the change of nonce that makes such a page ours. Laws L3-L7, L9, L10. Until
// `restamp` a page bears its sender's nonce, so that no kernel here reads it.
//
// A sequence's last page may be partly written. `close_tail` makes it fit to travel: zeros behind its last token, so that nothing of whoever
// had the page before goes along, and a digest over all of it, as of a full page. At the receiver `restamp` takes that digest out of the seal
// again: the page is its holder's to go on with.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "digest.h"
#include "layout.h"

namespace kvseal {

// Numbers shared with kvseal/kv/seal.py; those of SealCheck keep their meaning.
enum PageCheck : int32_t { PAGE_CLEAN = 0, PAGE_DIGEST = 11, PAGE_FOLD = 12 };

struct PageClaim {
    uint64_t nonce;
    uint64_t scope[2];
    uint32_t ordinal;
    uint16_t filled;      // page_tokens, or fewer of the last page
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

// One cache line, loaded once: stored around the caches where the machine can do that, and given as words. (With the words taken from the
// vectors that are stored, not loaded for themselves and put together again, the copy below is a quarter faster.)
inline void move_line(uint8_t* to, const uint8_t* from, uint64_t words[8]) {
#if defined(__SSE2__)
    for (int k = 0; k < 4; ++k) {
        const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + k);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to) + k, pair);
        words[2 * k] = static_cast<uint64_t>(_mm_cvtsi128_si64(pair));
        words[2 * k + 1] = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(pair, pair)));
    }
#else
    std::memcpy(words, from, 64);
    std::memcpy(to, words, 64);
#endif
}

// Copies a run of whole cache lines and digests what it stores, each byte loaded once: the digest is that of the bytes put in place, even if
// the source changes meanwhile. Nobody reads the page soon, and stores that go around the caches save half the traffic of a copy. The same
// digest as digest_of (native/digest.h).
inline Digest copy_and_digest(uint8_t* to, const uint8_t* from, size_t bytes, uint64_t seed) {
    using namespace digest_detail;
    constexpr size_t AHEAD = 4096;
    uint64_t a = seed ^ K0, b = seed ^ K1, c = seed ^ K2, d = seed ^ K3;
    for (size_t i = 0; i < bytes; i += 64) {
        uint64_t w[8];
        __builtin_prefetch(from + i + AHEAD, 0, 0);
        move_line(to + i, from + i, w);
        const uint64_t a0 = a, c0 = c;
        a = digest_detail::fold(w[0] ^ K1, w[1] ^ a) + b;
        c = digest_detail::fold(w[2] ^ K2, w[3] ^ c) + d;
        b = digest_detail::fold(w[4] ^ K3, w[5] ^ b) + c0;
        d = digest_detail::fold(w[6] ^ K0, w[7] ^ d) + a0;
    }
    return digest_end(a, b, c, d, bytes);
}

// One layer of one page as it stands in memory; adds its digest to the fold. `copied`: the digest of the bytes that were just put there.
static inline int32_t check_section(const KVLayout& kv, int64_t page, int layer, const PageClaim& claim, bool recompute, const Digest* copied, Fold& fold) {
    const Seal* seal = kv.seal(page, layer);
    const Expected want{claim.nonce, {claim.scope[0], claim.scope[1]}, kv.format, claim.ordinal, static_cast<uint16_t>(layer)};
    const SealCheck identity = check_identity(seal, want);
    if (identity != CLEAN) return identity;
    if (filled_slots(seal) != claim.filled) return FILLED;
    if (recompute || copied != nullptr) {
        const Digest found = copied != nullptr ? *copied : digest_of(kv.run(page, layer, false), static_cast<size_t>(2 * kv.run_bytes), kv.format);
        if (found.low != seal->digest[0] || found.high != seal->digest[1]) return PAGE_DIGEST;
    }
    fold.add(layer, seal->digest[0], seal->digest[1]);
    return PAGE_CLEAN;
}

static inline PageBreak check_page(const KVLayout& kv, int64_t page, const PageClaim& claim, bool recompute) {
    Fold fold;
    for (int layer = 0; layer < kv.layers; ++layer) {
        const int32_t check = check_section(kv, page, layer, claim, recompute, nullptr, fold);
        if (check != PAGE_CLEAN) return {check, layer};
    }
    return fold.equals(claim.fold) ? PageBreak{PAGE_CLEAN, 0} : PageBreak{PAGE_FOLD, kv.layers - 1};
}

static inline PageBreak copy_page(const KVLayout& kv, int64_t page, const uint8_t* source, const PageClaim& claim) {
    Fold fold;
    for (int layer = 0; layer < kv.layers; ++layer) {
        const uint8_t* from = source + layer * kv.section_bytes;
        std::memcpy(kv.section(page, layer), from, sizeof(Seal));
        const Digest copied = copy_and_digest(kv.run(page, layer, false), from + sizeof(Seal), static_cast<size_t>(2 * kv.run_bytes), kv.format);
        const int32_t check = check_section(kv, page, layer, claim, false, &copied, fold);
        if (check != PAGE_CLEAN) return {check, layer};
    }
    return fold.equals(claim.fold) ? PageBreak{PAGE_CLEAN, 0} : PageBreak{PAGE_FOLD, kv.layers - 1};
}

// After `copy_page`, before anybody is told: stores that went around the caches are visible from here on.
static inline void copies_done() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Has the system provide the memory of a page now, and not at the first byte that is written to it, where a transfer would wait for it. What
// stands there does not change.
static inline void provide_memory(uint8_t* page, int64_t page_bytes) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
    const uintptr_t unit = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(page);
    const uintptr_t first = at / unit * unit, last = at + static_cast<uintptr_t>(page_bytes);
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_POPULATE_WRITE);  // refused: it comes with the first byte
#else
    (void)page;
    (void)page_bytes;
#endif
}

// Gives a proven page our own nonce. Every line is compared once more before the first is written. A page that is not full loses its digest
// first: with one, no kernel would write to it.
static inline PageBreak restamp_page(const KVLayout& kv, int64_t page, const PageClaim& claim, uint64_t nonce) {
    const PageBreak found = check_page(kv, page, claim, false);
    if (found.check != PAGE_CLEAN) return found;
    for (int layer = 0; layer < kv.layers; ++layer) {
        Seal* seal = kv.seal(page, layer);
        if (claim.filled < kv.page_tokens) seal->digest[0] = seal->digest[1] = 0;
        __atomic_store_n(&seal->nonce, nonce, __ATOMIC_RELEASE);
    }
    return {PAGE_CLEAN, 0};
}

// Zeros in every slot of a run (K or V of one layer) from `filled` on, its scales and its padding.
static inline void clear_behind(const KVLayout& kv, uint8_t* run, int filled) {
    const int64_t vector_bytes = kv.element_run_bytes / (static_cast<int64_t>(kv.kv_heads) * kv.page_tokens);
    const int64_t unused = kv.page_tokens - filled;
    const bool scaled = kv.kind == KV_INT8 || kv.kind == KV_INT4;
    const int64_t scales = scaled ? static_cast<int64_t>(kv.kv_heads) * kv.page_tokens * 4 : 0;
    for (int64_t head = 0; head < kv.kv_heads; ++head) {
        const int64_t slot = head * kv.page_tokens + filled;
        std::memset(run + slot * vector_bytes, 0, static_cast<size_t>(unused * vector_bytes));
        if (scaled) std::memset(run + kv.element_run_bytes + slot * 4, 0, static_cast<size_t>(unused * 4));
    }
    std::memset(run + kv.element_run_bytes + scales, 0, static_cast<size_t>(kv.run_bytes - kv.element_run_bytes - scales));
}

// For the holder of a page with `claim.filled` slots that nobody will write any more: everything behind them becomes zero, and the whole is
// digested. Every seal is compared before a byte is written. `found` gets the page's digest.
static inline PageBreak close_tail(const KVLayout& kv, int64_t page, const PageClaim& claim, Fold& found) {
    for (int layer = 0; layer < kv.layers; ++layer) {
        const Seal* seal = kv.seal(page, layer);
        const Expected want{claim.nonce, {claim.scope[0], claim.scope[1]}, kv.format, claim.ordinal, static_cast<uint16_t>(layer)};
        const SealCheck identity = check_identity(seal, want);
        if (identity != CLEAN) return {identity, layer};
        if (filled_slots(seal) != claim.filled) return {FILLED, layer};
        if ((seal->digest[0] | seal->digest[1]) != 0) return {REUSED, layer};
    }
    for (int layer = 0; layer < kv.layers; ++layer) {
        Seal* seal = kv.seal(page, layer);
        clear_behind(kv, kv.run(page, layer, false), claim.filled);
        clear_behind(kv, kv.run(page, layer, true), claim.filled);
        const Digest digest = digest_of(kv.run(page, layer, false), static_cast<size_t>(2 * kv.run_bytes), kv.format);
        seal->digest[0] = digest.low;
        seal->digest[1] = digest.high;
        found.add(layer, digest.low, digest.high);
    }
    return {PAGE_CLEAN, 0};
}

}  // namespace kvseal
