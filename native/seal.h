// The seal: the 64-byte line in front of each layer's run, and the comparisons that guard every read and write.
//
// Owns the layout (twin of kvseal/kv/seal.py; a conformance test compares the two byte by byte) and the checks of laws L3 (nonce),
// L4 (scope), L5 (filled), L6 (ordinal, layer), L7 (digest) and L10 (format). Never touches payload.
// Functions are `static`: this header is compiled once per instruction set, and the copies must not be merged by the linker.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvseal {

struct alignas(64) Seal {
    uint64_t magic;
    uint64_t nonce;
    uint64_t scope[2];
    uint64_t format;
    uint32_t ordinal;
    uint16_t layer;
    uint16_t filled;
    uint64_t digest[2];
};
static_assert(sizeof(Seal) == 64, "a seal is one cache line");
static_assert(offsetof(Seal, nonce) == 8 && offsetof(Seal, scope) == 16 && offsetof(Seal, format) == 32, "seal layout");
static_assert(offsetof(Seal, ordinal) == 40 && offsetof(Seal, layer) == 44 && offsetof(Seal, filled) == 46, "seal layout");
static_assert(offsetof(Seal, digest) == 48, "seal layout");
#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "seals are little endian");
#endif

constexpr uint64_t SEAL_MAGIC = 0x31304C414553564BULL;  // "KVSEAL01", little endian

// The twin that `kvseal bench safety` builds for itself, to see what the checks cost, has none. It is never installed, and no engine starts on it.
#if defined(KVSEAL_WITHOUT_CHECKS)
constexpr bool CHECKED = false;
#else
constexpr bool CHECKED = true;
#endif

// Numbers shared with kvseal/kv/seal.py.
enum SealCheck : int32_t { CLEAN = 0, MAGIC, NONCE, SCOPE, FORMAT, LAYER, ORDINAL, FILLED, LEDGER, REUSED, TABLE };

// What a row knows about a page of its table: what the seal must say.
struct Expected {
    uint64_t nonce;
    uint64_t scope[2];
    uint64_t format;
    uint32_t ordinal;
    uint16_t layer;
};

static inline uint16_t filled_slots(const Seal* seal) { return __atomic_load_n(&seal->filled, __ATOMIC_ACQUIRE); }

// Identity of a written page, in the order in which breaks are reported; CLEAN when all fields agree.
static inline SealCheck check_identity(const Seal* seal, const Expected& want) {
    const uint64_t differ = (seal->magic ^ SEAL_MAGIC) | (seal->nonce ^ want.nonce) | (seal->scope[0] ^ want.scope[0]) |
                            (seal->scope[1] ^ want.scope[1]) | (seal->format ^ want.format) | (seal->layer ^ want.layer) |
                            (seal->ordinal ^ want.ordinal);
    if (__builtin_expect(differ == 0, 1)) return CLEAN;
    if (seal->magic != SEAL_MAGIC) return MAGIC;
    if (seal->nonce != want.nonce) return NONCE;
    if (seal->scope[0] != want.scope[0] || seal->scope[1] != want.scope[1]) return SCOPE;
    if (seal->format != want.format) return FORMAT;
    if (seal->layer != want.layer) return LAYER;
    return ORDINAL;
}

// May `needed_slots` slots of this page be read?
static inline SealCheck check_read(const Seal* seal, const Expected& want, int needed_slots) {
    if (!CHECKED) return CLEAN;
    const SealCheck identity = check_identity(seal, want);
    if (__builtin_expect(identity != CLEAN, 0)) return identity;
    return filled_slots(seal) >= needed_slots ? CLEAN : FILLED;
}

// May slot `slot` of this page be written next? Slot 0 begins a hand-out: the pool's ledger must know it and the seal must not.
static inline SealCheck check_write(const Seal* seal, const Expected& want, int slot, uint64_t ledger_nonce) {
    if (!CHECKED) return CLEAN;
    if (slot == 0) {
        if (ledger_nonce != want.nonce || want.nonce == 0) return LEDGER;
        return seal->nonce == want.nonce ? REUSED : CLEAN;
    }
    const SealCheck identity = check_identity(seal, want);
    if (identity != CLEAN) return identity;
    if (filled_slots(seal) != slot) return FILLED;
    return (seal->digest[0] | seal->digest[1]) != 0 ? REUSED : CLEAN;
}

// After K and V are in place: the line itself on the first write of a hand-out, then `filled`, last and released (L5).
static inline void advance(Seal* seal, const Expected& want, int slot, int filled) {
    if (slot == 0) {
        __atomic_store_n(&seal->filled, static_cast<uint16_t>(0), __ATOMIC_RELEASE);  // never the new nonce with the old count
        seal->magic = SEAL_MAGIC;
        seal->nonce = want.nonce;
        seal->scope[0] = want.scope[0];
        seal->scope[1] = want.scope[1];
        seal->format = want.format;
        seal->ordinal = want.ordinal;
        seal->layer = want.layer;
        seal->digest[0] = seal->digest[1] = 0;
    }
    __atomic_store_n(&seal->filled, static_cast<uint16_t>(filled), __ATOMIC_RELEASE);
}

}  // namespace kvseal
