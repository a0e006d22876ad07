// What the files of the Python face share: argument checks, memory, and the tables of a step.
//
// Owns lifetimes of mappings and the locks on block tables while kernels read them. Computes nothing.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "decoder.h"
#include "slab.h"

namespace nb = nanobind;

namespace kvseal {
namespace binding {

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using InOut = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using BreakTuple = std::tuple<int, int, int64_t, int64_t, int>;

inline void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

inline const Kernels& kernels_of(const std::string& isa) {
    const Kernels* sets[MOST_KERNEL_SETS];
    const int count = available_kernels(sets);
    for (int i = 0; i < count; ++i)
        if (isa == "auto" || isa == sets[i]->name) return *sets[i];
    throw std::invalid_argument("instruction set " + isa + " is not available here");
}
inline std::vector<std::string> kernel_names() {
    const Kernels* sets[MOST_KERNEL_SETS];
    std::vector<std::string> names(static_cast<size_t>(available_kernels(sets)));
    for (size_t i = 0; i < names.size(); ++i) names[i] = sets[i]->name;
    return names;
}

// --- memory ---------------------------------------------------------------------------------------------------------------------------

struct Arena {
    Arena(int64_t pages, int64_t page_bytes, bool shared) : pages(pages), page_bytes(page_bytes) {
        require(pages > 0 && page_bytes > 0 && page_bytes % 64 == 0, "an arena needs pages of whole cache lines");
        mapping = std::make_shared<Mapping>(pages * page_bytes, shared);
    }
    // -1 unless shared.
    int file() const { return mapping == nullptr ? -1 : mapping->file(); }
    uint8_t* data() const {
        require(mapping != nullptr, "the arena is closed");
        return mapping->data();
    }
    nb::object memory() const {
        uint8_t* at = data();
        auto* keep = new std::shared_ptr<Mapping>(mapping);
        nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(p); });
        return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(at, {static_cast<size_t>(pages), static_cast<size_t>(page_bytes)}, owner));
    }

    int64_t pages, page_bytes;
    std::shared_ptr<Mapping> mapping;
};

// --- steps ----------------------------------------------------------------------------------------------------------------------------

// The buffers of a step's block tables, locked against resizing while the kernels read them.
class Tables {
  public:
    explicit Tables(nb::sequence tables) {
        const size_t n = nb::len(tables);
        views_.reserve(n);
        for (size_t i = 0; i < n; ++i) {
            nb::object table = tables[i];
            Py_buffer view;
            if (PyObject_GetBuffer(table.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
            views_.push_back(view);
            const bool words = view.itemsize == 8 && view.format != nullptr && (view.format[0] == 'Q' || view.format[0] == 'L');
            require(words && (view.len / 8) % 2 == 0, "a block table is an array of typecode 'Q' of pairs (page, nonce)");
        }
    }
    ~Tables() {
        for (Py_buffer& view : views_) PyBuffer_Release(&view);
    }
    Tables(const Tables&) = delete;
    Tables& operator=(const Tables&) = delete;

    size_t size() const { return views_.size(); }
    const uint64_t* stamps(size_t i) const { return static_cast<const uint64_t*>(views_[i].buf); }
    int64_t pages(size_t i) const { return views_[i].len / 16; }

  private:
    std::vector<Py_buffer> views_;
};

inline std::vector<Row> rows_of(const Tables& tables, const In<int32_t, 1>& offsets, const In<int32_t, 1>& starts, const In<uint64_t, 2>& scopes,
                         int64_t total_tokens) {
    const size_t n = tables.size();
    require(offsets.size() == n + 1 && starts.size() == n && scopes.shape(0) == n && scopes.shape(1) == 2, "row arrays disagree in length");
    require(offsets.data()[0] == 0 && offsets.data()[n] == total_tokens, "row_offsets must run from 0 to the number of tokens");
    std::vector<Row> rows(n);
    for (size_t i = 0; i < n; ++i) {
        Row& row = rows[i];
        row.stamps = tables.stamps(i);
        row.table_pages = tables.pages(i);
        row.scope[0] = scopes.data()[2 * i];
        row.scope[1] = scopes.data()[2 * i + 1];
        row.first_token = offsets.data()[i];
        row.count = offsets.data()[i + 1] - offsets.data()[i];
        row.start = starts.data()[i];
        require(row.count > 0, "every row needs at least one token");
        require(row.start >= 0 && row.start <= INT32_MAX - row.count, "a start position is negative or too large");
    }
    return rows;
}

inline std::vector<BreakTuple> as_tuples(const std::vector<Break>& breaks) {
    std::vector<BreakTuple> out;
    for (const Break& b : breaks) out.emplace_back(b.row, static_cast<int>(b.check), b.page, b.ordinal, b.layer);
    return out;
}

using MaybeVector = std::optional<In<float, 1>>;

// Adds the single kernels, which the conformance suite calls one by one, to the module (module_kernels.cpp).
void add_kernels(nb::module_& m);
// The proof of pages that came from another node (module_handoff.cpp).
void add_handoff(nb::module_& m);
// Logits become tokens (module_sampling.cpp).
void add_sampling(nb::module_& m);

}  // namespace binding
}  // namespace kvseal
