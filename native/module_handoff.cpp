// The Python face of native/handoff.h.
//
// Owns argument checks; every page number is compared with its arena before a byte is read or written. The GIL is released.
#include "handoff.h"

#include "bindings.h"

namespace kvseal {
namespace binding {
namespace {

using Pages = In<int32_t, 1>;
using Words = In<uint64_t, 1>;
using Filled = In<uint16_t, 1>;
using Found = std::optional<std::tuple<int, int, int>>;  // index, layer, check

struct Claims {
    Claims(const Pages& pages, const Words& nonces, const Pages& ordinals, const Filled& filled, const Words& scope, const In<uint8_t, 2>& folds)
        : pages(pages.data()), nonces(nonces.data()), ordinals(ordinals.data()), filled(filled.data()), scope{scope.data()[0], scope.data()[1]},
          folds(folds.data()), count(pages.size()) {
        require(nonces.size() == count && ordinals.size() == count && filled.size() == count && folds.shape(0) == count,
                "one nonce, ordinal, filled and fold for each page");
    }
    PageClaim operator[](size_t i) const {
        return {nonces[i], {scope[0], scope[1]}, static_cast<uint32_t>(ordinals[i]), filled[i], folds + 16 * i};
    }

    const int32_t* pages;
    const uint64_t* nonces;
    const int32_t* ordinals;
    const uint16_t* filled;
    uint64_t scope[2];
    const uint8_t* folds;
    size_t count;
};

KVLayout bound(const KVLayout& layout, InOut<uint8_t, 2>& memory) {
    require(static_cast<int64_t>(memory.shape(1)) == layout.page_bytes, "memory and geometry disagree on page_bytes");
    require(reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0, "an arena begins at a cache line");
    KVLayout kv = layout;
    kv.memory = memory.data();
    kv.pages = static_cast<int64_t>(memory.shape(0));
    return kv;
}

void require_pages(const Pages& pages, size_t of) {
    for (size_t i = 0; i < pages.size(); ++i)
        require(pages.data()[i] >= 0 && static_cast<size_t>(pages.data()[i]) < of, "a page is outside its arena");
}

void require_shapes(const Words& scope, const In<uint8_t, 2>& folds) {
    require(scope.size() == 2 && folds.shape(1) == 16, "scope has two words, a fold 16 bytes");
}

Found check_pages(const KVLayout& layout, InOut<uint8_t, 2> memory, Pages pages, Words nonces, Pages ordinals, Filled filled, Words scope,
                  In<uint8_t, 2> folds, bool recompute) {
    const KVLayout kv = bound(layout, memory);
    require_pages(pages, memory.shape(0));
    require_shapes(scope, folds);
    const Claims claims(pages, nonces, ordinals, filled, scope, folds);
    nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < claims.count; ++i) {
        const PageBreak found = check_page(kv, claims.pages[i], claims[i], recompute);
        if (found.check != PAGE_CLEAN) return std::make_tuple(static_cast<int>(i), found.layer, found.check);
    }
    return {};
}

Found copy_pages(const KVLayout& layout, InOut<uint8_t, 2> memory, Pages pages, In<uint8_t, 2> source, Pages source_pages, Words nonces,
                 Pages ordinals, Filled filled, Words scope, In<uint8_t, 2> folds) {
    const KVLayout kv = bound(layout, memory);
    require(source.shape(1) == memory.shape(1) && source_pages.size() == pages.size(), "source and destination disagree");
    require_pages(pages, memory.shape(0));
    require_pages(source_pages, source.shape(0));
    require_shapes(scope, folds);
    const Claims claims(pages, nonces, ordinals, filled, scope, folds);
    const uint8_t* from = source.data();
    const int32_t* from_pages = source_pages.data();
    nb::gil_scoped_release unlocked;
    Found first;
    for (size_t i = 0; i < claims.count && !first; ++i) {
        const PageBreak found = copy_page(kv, claims.pages[i], from + from_pages[i] * kv.page_bytes, claims[i]);
        if (found.check != PAGE_CLEAN) first = std::make_tuple(static_cast<int>(i), found.layer, found.check);
    }
    copies_done();
    return first;
}

Found restamp_pages(const KVLayout& layout, InOut<uint8_t, 2> memory, Pages pages, Words nonces, Pages ordinals, Filled filled, Words scope,
                    In<uint8_t, 2> folds, Words fresh_nonces) {
    const KVLayout kv = bound(layout, memory);
    require_pages(pages, memory.shape(0));
    require_shapes(scope, folds);
    require(fresh_nonces.size() == pages.size(), "one fresh nonce for each page");
    const Claims claims(pages, nonces, ordinals, filled, scope, folds);
    nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < claims.count; ++i) {
        const PageBreak found = restamp_page(kv, claims.pages[i], claims[i], fresh_nonces.data()[i]);
        if (found.check != PAGE_CLEAN) return std::make_tuple(static_cast<int>(i), found.layer, found.check);
    }
    return {};
}

void provide_pages(InOut<uint8_t, 2> memory, Pages pages) {
    require_pages(pages, memory.shape(0));
    uint8_t* at = memory.data();
    const int64_t page_bytes = static_cast<int64_t>(memory.shape(1));
    nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < pages.size(); ++i) provide_memory(at + pages.data()[i] * page_bytes, page_bytes);
}

Found close_tail_page(const KVLayout& layout, InOut<uint8_t, 2> memory, int page, uint64_t nonce, int ordinal, int filled, Words scope,
                      InOut<uint8_t, 1> fold) {
    const KVLayout kv = bound(layout, memory);
    require(page >= 0 && page < kv.pages, "a page is outside its arena");
    require(0 < filled && filled < kv.page_tokens, "a tail is a page with some of its slots written, not all");
    require(scope.size() == 2 && fold.shape(0) == 16, "scope has two words, a fold 16 bytes");
    const PageClaim claim{nonce, {scope.data()[0], scope.data()[1]}, static_cast<uint32_t>(ordinal), static_cast<uint16_t>(filled), nullptr};
    uint8_t* out = fold.data();
    nb::gil_scoped_release unlocked;
    Fold made;
    const PageBreak found = close_tail(kv, page, claim, made);
    if (found.check != PAGE_CLEAN) return std::make_tuple(0, found.layer, found.check);
    std::memcpy(out, &made.low, 8);
    std::memcpy(out + 8, &made.high, 8);
    return {};
}

}  // namespace

void add_handoff(nb::module_& m) {
    m.def("check_pages", &check_pages, nb::kw_only(), nb::arg("layout"), nb::arg("memory").noconvert(), nb::arg("pages"), nb::arg("nonces"),
          nb::arg("ordinals"), nb::arg("filled"), nb::arg("scope"), nb::arg("folds"), nb::arg("recompute"));
    m.def("copy_pages", &copy_pages, nb::kw_only(), nb::arg("layout"), nb::arg("memory").noconvert(), nb::arg("pages"), nb::arg("source").noconvert(),
          nb::arg("source_pages"), nb::arg("nonces"), nb::arg("ordinals"), nb::arg("filled"), nb::arg("scope"), nb::arg("folds"));
    m.def("restamp_pages", &restamp_pages, nb::kw_only(), nb::arg("layout"), nb::arg("memory").noconvert(), nb::arg("pages"), nb::arg("nonces"),
          nb::arg("ordinals"), nb::arg("filled"), nb::arg("scope"), nb::arg("folds"), nb::arg("fresh_nonces"));
    m.def("provide_pages", &provide_pages, nb::kw_only(), nb::arg("memory").noconvert(), nb::arg("pages"));
    m.def("close_tail", &close_tail_page, nb::kw_only(), nb::arg("layout"), nb::arg("memory").noconvert(), nb::arg("page"), nb::arg("nonce"),
          nb::arg("ordinal"), nb::arg("filled"), nb::arg("scope"), nb::arg("fold").noconvert());
}

}  // namespace binding
}  // namespace kvseal
