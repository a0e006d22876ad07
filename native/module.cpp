// The Python face of the native part: kvseal._native.
//
// Owns argument checks and lifetimes; computes nothing. Every array is checked for type, order and shape before a pointer leaves here;
// what does not fit raises ValueError or TypeError; an array that is written is never converted. The GIL is released while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "decoder.h"
#include "digest.h"
#include "sample.h"

namespace nb = nanobind;
using namespace kvseal;

namespace {

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using InOut = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using BreakTuple = std::tuple<int, int, int64_t, int64_t, int>;

void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

const Kernels& kernels_of(const std::string& isa) {
    const Kernels* avx2 = avx2_kernels();
    if (isa == "portable") return portable_kernels();
    if (isa == "avx2" && avx2 != nullptr) return *avx2;
    if (isa == "auto") return avx2 != nullptr ? *avx2 : portable_kernels();
    throw std::invalid_argument("instruction set " + isa + " is not available here");
}

// --- memory ---------------------------------------------------------------------------------------------------------------------------

struct Arena {
    Arena(int64_t pages, int64_t page_bytes) : pages(pages), page_bytes(page_bytes) {
        require(pages > 0 && page_bytes > 0 && page_bytes % 64 == 0, "an arena needs pages of whole cache lines");
        mapping = std::make_shared<Mapping>(pages * page_bytes);
    }
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

struct Packed {
    Linear linear;
    int64_t bytes;
    std::shared_ptr<Mapping> mapping;
};

struct WeightSlab {
    explicit WeightSlab(int64_t bytes) : mapping(std::make_shared<Mapping>(bytes)) {}

    Packed pack(In<uint8_t, 1> raw, const std::string& type, int64_t rows, int64_t columns, const std::string& format,
                std::optional<In<int32_t, 1>> row_order) {
        require(rows > 0 && columns > 0 && rows < INT32_MAX && columns < INT32_MAX, "rows and columns must be positive");
        const SourceType source = source_type(type);
        const PackFormat target = pack_format(format);
        require(static_cast<int64_t>(raw.size()) == rows * source_row_bytes(source, columns), "raw bytes do not match rows x columns of this type");
        const int32_t* order = nullptr;
        if (row_order) {
            require(static_cast<int64_t>(row_order->size()) == rows, "row_order needs one entry per row");
            order = row_order->data();
            for (int64_t i = 0; i < rows; ++i) require(order[i] >= 0 && order[i] < rows, "row_order names a row that is not there");
        }
        const int64_t bytes = packed_bytes(target, rows, columns);
        if (used + bytes > mapping->bytes()) throw std::invalid_argument("the slab is full");
        uint8_t* at = mapping->data() + used;
        used += bytes;
        nb::gil_scoped_release unlocked;
        return {kvseal::pack(source, raw.data(), rows, columns, order, target, at), bytes, mapping};
    }

    std::shared_ptr<Mapping> mapping;
    int64_t used = 0;
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

std::vector<Row> rows_of(const Tables& tables, const In<int32_t, 1>& offsets, const In<int32_t, 1>& starts, const In<uint64_t, 2>& scopes,
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

std::vector<BreakTuple> as_tuples(const std::vector<Break>& breaks) {
    std::vector<BreakTuple> out;
    for (const Break& b : breaks) out.emplace_back(b.row, static_cast<int>(b.check), b.page, b.ordinal, b.layer);
    return out;
}

// --- decoder --------------------------------------------------------------------------------------------------------------------------

using MaybeVector = std::optional<In<float, 1>>;
Vector vector_of(const MaybeVector& v) { return v ? Vector(v->data(), v->data() + v->size()) : Vector(); }

struct Layer {
    LayerParts parts;
    std::vector<std::shared_ptr<Mapping>> keep;
};

struct NativeDecoder {
    std::unique_ptr<Decoder> decoder;
    std::vector<std::shared_ptr<Mapping>> keep;
    In<uint8_t, 1> embedding_raw;
    std::vector<int32_t> embedding_order;

    const Decoder& get() const { return *decoder; }
};

NativeDecoder make_decoder(const ModelNumbers& numbers, const KVLayout& layout, const Arena& arena, const std::vector<Layer*>& layers,
                                            In<float, 1> final_norm, const Packed& lm_head, In<uint8_t, 1> embedding, const std::string& embedding_type,
                                            std::optional<In<int32_t, 1>> embedding_order, int threads, const std::string& isa) {
    require(threads >= 1 && threads <= 1024, "threads must be from 1 to 1024");
    require(arena.page_bytes == layout.page_bytes, "arena and geometry disagree on page_bytes");
    NativeDecoder native;
    KVLayout kv = layout;
    kv.pages = arena.pages;
    kv.memory = arena.data();
    native.keep = {arena.mapping, lm_head.mapping};
    std::vector<LayerParts> parts;
    for (const Layer* layer : layers) {
        parts.push_back(layer->parts);
        native.keep.insert(native.keep.end(), layer->keep.begin(), layer->keep.end());
    }
    Embedding table;
    table.type = source_type(embedding_type);
    table.row_bytes = source_row_bytes(table.type, numbers.hidden_size);
    table.raw = embedding.data();
    require(static_cast<int64_t>(embedding.size()) == table.row_bytes * numbers.vocab_size, "embedding bytes do not match vocabulary x hidden size");
    native.embedding_raw = embedding;
    if (embedding_order) {
        require(static_cast<int>(embedding_order->size()) == numbers.vocab_size, "embedding row_order needs one entry per token");
        native.embedding_order.assign(embedding_order->data(), embedding_order->data() + embedding_order->size());
        for (int32_t i : native.embedding_order) require(i >= 0 && i < numbers.vocab_size, "embedding row_order names a row that is not there");
        table.row_order = native.embedding_order.data();
    }
    native.decoder = std::make_unique<Decoder>(numbers, kv, std::move(parts), Vector(final_norm.data(), final_norm.data() + final_norm.size()),
                                                lm_head.linear, table, threads, kernels_of(isa));
    return native;
}

std::vector<BreakTuple> forward(NativeDecoder& self, In<int32_t, 1> tokens, In<int32_t, 1> offsets, In<int32_t, 1> starts, nb::sequence tables,
                                In<uint64_t, 2> scopes, In<int32_t, 1> hidden_counts, In<uint64_t, 1> ledger_nonces, InOut<float, 2> hidden) {
    const Decoder& d = self.get();
    const Tables views(tables);
    Step step;
    step.rows = rows_of(views, offsets, starts, scopes, static_cast<int64_t>(tokens.size()));
    require(hidden_counts.size() == step.rows.size(), "hidden_counts needs one entry per row");
    require(static_cast<int64_t>(ledger_nonces.size()) == d.kv().pages, "ledger_nonces needs one entry per page of the arena");
    int64_t wanted = 0;
    for (size_t i = 0; i < step.rows.size(); ++i) {
        require(hidden_counts.data()[i] >= 0 && hidden_counts.data()[i] <= step.rows[i].count, "hidden_counts exceeds a row's tokens");
        wanted += hidden_counts.data()[i];
    }
    for (size_t i = 0; i < tokens.size(); ++i)
        require(tokens.data()[i] >= 0 && tokens.data()[i] < d.numbers().vocab_size, "a token id is outside the vocabulary");
    require(static_cast<int64_t>(hidden.shape(0)) == wanted && static_cast<int>(hidden.shape(1)) == d.numbers().hidden_size, "hidden has the wrong shape");
    if (step.rows.empty()) return {};
    step.tokens = tokens.data();
    step.total_tokens = static_cast<int>(tokens.size());
    step.hidden_counts = hidden_counts.data();
    step.ledger_nonces = ledger_nonces.data();
    step.hidden = hidden.data();
    std::vector<Break> breaks;
    {
        nb::gil_scoped_release unlocked;
        breaks = self.decoder->forward(step);
    }
    return as_tuples(breaks);
}

void logits(NativeDecoder& self, In<float, 2> hidden, InOut<float, 2> out) {
    const ModelNumbers& m = self.get().numbers();
    require(static_cast<int>(hidden.shape(1)) == m.hidden_size && out.shape(0) == hidden.shape(0) && static_cast<int>(out.shape(1)) == m.vocab_size,
            "hidden or logits have the wrong shape");
    if (hidden.shape(0) == 0) return;
    nb::gil_scoped_release unlocked;
    self.decoder->logits(hidden.data(), static_cast<int>(hidden.shape(0)), out.data());
}

bool seal_digests(NativeDecoder& self, In<int32_t, 1> pages, InOut<uint8_t, 2> folds) {
    require(folds.shape(0) == pages.size() && folds.shape(1) == 16, "folds has the wrong shape");
    for (size_t i = 0; i < pages.size(); ++i) require(pages.data()[i] >= 0 && pages.data()[i] < self.get().kv().pages, "a page is outside the arena");
    nb::gil_scoped_release unlocked;
    return self.decoder->seal_digests(pages.data(), static_cast<int>(pages.size()), folds.data());
}

// --- single kernels, for the conformance suite ----------------------------------------------------------------------------------------

void linear_kernel(const Packed& packed, In<float, 2> x, InOut<float, 2> out, MaybeVector bias, const std::string& isa) {
    const Linear& w = packed.linear;
    require(static_cast<int>(x.shape(1)) == w.columns && out.shape(0) == x.shape(0) && static_cast<int>(out.shape(1)) == w.rows, "x or out have the wrong shape");
    require(!bias || static_cast<int>(bias->size()) == w.rows, "bias has the wrong length");
    const Kernels& k = kernels_of(isa);
    const int tokens = static_cast<int>(x.shape(0));
    Activations in;
    in.width = w.columns;
    in.want_quants = w.quantised();
    in.resize(tokens);
    std::copy(x.data(), x.data() + x.size(), in.values.data());
    for (int64_t t = 0; w.quantised() && t < tokens; ++t) k.quantise(in.values.data() + t * w.columns, w.columns, in.groups_of(t));
    nb::gil_scoped_release unlocked;
    k.linear(w, in.inputs(), 0, tokens, 0, w.row_blocks, {out.data(), w.rows, bias ? bias->data() : nullptr, 1.0f, false});
}

KVLayout bound(const KVLayout& layout, const Arena& arena, int layer) {
    require(arena.page_bytes == layout.page_bytes, "arena and geometry disagree on page_bytes");
    require(layer >= 0 && layer < layout.layers, "layer is out of range");
    KVLayout kv = layout;
    kv.pages = arena.pages;
    kv.memory = arena.data();
    return kv;
}

std::vector<BreakTuple> append_kernel(const Arena& arena, const KVLayout& layout, int layer, In<int32_t, 1> offsets, In<int32_t, 1> starts,
                                      nb::sequence tables, In<uint64_t, 2> scopes, In<uint64_t, 1> ledger_nonces, In<float, 3> k, In<float, 3> v,
                                      const std::string& isa) {
    const KVLayout kv = bound(layout, arena, layer);
    const Tables views(tables);
    for (const auto* x : {&k, &v})
        require(static_cast<int>(x->shape(1)) == kv.kv_heads && static_cast<int>(x->shape(2)) == kv.head_dim, "k or v have the wrong shape");
    require(k.shape(0) == v.shape(0) && static_cast<int64_t>(ledger_nonces.size()) == kv.pages, "k, v or ledger_nonces have the wrong length");
    const std::vector<Row> rows = rows_of(views, offsets, starts, scopes, static_cast<int64_t>(k.shape(0)));
    const Kernels& kernels = kernels_of(isa);
    PageGuard guard(kv);
    guard.begin(rows, ledger_nonces.data());
    guard.check_append(layer);
    for (size_t r = 0; r < rows.size(); ++r)
        for (int i = 0; i < rows[r].count && !guard.dead(static_cast<int>(r)); ++i) {
            const int64_t token = rows[r].first_token + i, position = rows[r].start + i, width = static_cast<int64_t>(kv.kv_heads) * kv.head_dim;
            kernels.store_kv(kv, static_cast<int64_t>(rows[r].page(position / kv.page_tokens)), layer, static_cast<int>(position % kv.page_tokens),
                             k.data() + token * width, v.data() + token * width);
        }
    guard.advance(layer);
    return as_tuples(guard.take());
}

std::vector<BreakTuple> attend_kernel(const Arena& arena, const KVLayout& layout, int layer, In<int32_t, 1> offsets, In<int32_t, 1> starts,
                                      nb::sequence tables, In<uint64_t, 2> scopes, In<float, 3> q, InOut<float, 3> out, float scale, int window,
                                      bool by_partition, const std::string& isa) {
    const KVLayout kv = bound(layout, arena, layer);
    const Tables views(tables);
    const int heads = static_cast<int>(q.shape(1)), dims = kv.head_dim, group = heads / kv.kv_heads;
    require(static_cast<int>(q.shape(2)) == dims && group > 0 && heads % kv.kv_heads == 0, "q has the wrong shape");
    require(out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) && out.shape(2) == q.shape(2), "out must have q's shape");
    require(dims % 8 == 0 && dims <= 512 && PARTITION_TOKENS % kv.page_tokens == 0, "head_dim must be a multiple of 8, at most 512");
    const std::vector<Row> rows = rows_of(views, offsets, starts, scopes, static_cast<int64_t>(q.shape(0)));
    const Kernels& kernels = kernels_of(isa);
    PageGuard guard(kv);
    guard.begin(rows, nullptr);
    std::vector<float> scratch(static_cast<size_t>(attend_scratch_floats(kv, group))), partials;
    const int block = by_partition ? 1 : attend_block_tokens(group);
    const int64_t stride = static_cast<int64_t>(heads) * dims;
    for (size_t r = 0; r < rows.size(); ++r)
        for (int t = 0; t < rows[r].count; t += block)
            for (int head = 0; head < kv.kv_heads; ++head) {
                const int64_t at = (rows[r].first_token + t) * stride + static_cast<int64_t>(head) * group * dims;
                const AttendWork work{&kv, &rows[r], layer, head, group, rows[r].start + t, std::min(block, rows[r].count - t), window, scale,
                                      q.data() + at, stride, scratch.data()};
                if (!by_partition) {
                    const uint64_t key = kernels.attend(work, out.data() + at, stride);
                    if (key != UNBROKEN) guard.report(static_cast<int>(r), key);
                    continue;
                }
                const int partitions = work.first_position / PARTITION_TOKENS + 1;
                const int64_t partial = static_cast<int64_t>(group) * (dims + 8);
                partials.resize(static_cast<size_t>(partitions * partial));
                for (int p = 0; p < partitions; ++p) {
                    const uint64_t key = kernels.attend_partition(work, p, partials.data() + p * partial);
                    if (key != UNBROKEN) guard.report(static_cast<int>(r), key);
                }
                kernels.attend_combine(partials.data(), partitions, group, dims, out.data() + at);
            }
    guard.collect(layer);
    for (size_t r = 0; r < rows.size(); ++r)
        if (guard.dead(static_cast<int>(r))) std::fill(out.data() + rows[r].first_token * stride, out.data() + (rows[r].first_token + rows[r].count) * stride, 0.0f);
    return as_tuples(guard.take());
}

KVLayout make_layout(int layers, int kv_heads, int head_dim, int page_tokens, const std::string& kv_dtype, int64_t run_bytes, int64_t element_run_bytes,
                     int64_t section_bytes, int64_t page_bytes, uint64_t format) {
    KVLayout kv{};
    kv.layers = layers;
    kv.kv_heads = kv_heads;
    kv.head_dim = head_dim;
    kv.page_tokens = page_tokens;
    const char* const names[] = {"fp32", "fp16", "int8", "int4"};
    int kind = -1;
    for (int i = 0; i < 4; ++i)
        if (kv_dtype == names[i]) kind = i;
    require(kind >= 0, "kv_dtype must be fp32, fp16, int8 or int4");
    kv.kind = static_cast<KVKind>(kind);
    kv.run_bytes = run_bytes;
    kv.element_run_bytes = element_run_bytes;
    kv.section_bytes = section_bytes;
    kv.page_bytes = page_bytes;
    kv.format = format;
    const int bits[] = {32, 16, 8, 4};
    require(layers > 0 && layers <= 65535 && kv_heads > 0 && head_dim > 0 && page_tokens > 0 && page_tokens <= 256, "a size is out of range");
    require(element_run_bytes == static_cast<int64_t>(kv_heads) * page_tokens * head_dim * bits[kind] / 8, "element_run_bytes");
    require(run_bytes % 64 == 0 && run_bytes >= element_run_bytes + (kind >= KV_INT8 ? static_cast<int64_t>(kv_heads) * page_tokens * 4 : 0), "run_bytes");
    require(section_bytes == static_cast<int64_t>(sizeof(Seal)) + 2 * run_bytes && page_bytes == layers * section_bytes, "section_bytes or page_bytes");
    return kv;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of KVSeal: append, attend (with the seal check), linear, norm, rope, sample, digest.";
    m.attr("SEAL_MAGIC") = SEAL_MAGIC;
    m.attr("PARTITION_TOKENS") = PARTITION_TOKENS;
    m.def("seal_layout", [] {
        nb::dict d;
        const auto add = [&d](const char* name, size_t offset, size_t size) { d[name] = nb::make_tuple(offset, size); };
        add("magic", offsetof(Seal, magic), sizeof(Seal::magic));
        add("nonce", offsetof(Seal, nonce), sizeof(Seal::nonce));
        add("scope", offsetof(Seal, scope), sizeof(Seal::scope));
        add("format", offsetof(Seal, format), sizeof(Seal::format));
        add("ordinal", offsetof(Seal, ordinal), sizeof(Seal::ordinal));
        add("layer", offsetof(Seal, layer), sizeof(Seal::layer));
        add("filled", offsetof(Seal, filled), sizeof(Seal::filled));
        add("digest", offsetof(Seal, digest), sizeof(Seal::digest));
        return d;
    });
    m.def("seal_bytes", [](uint64_t nonce, uint64_t scope_low, uint64_t scope_high, uint64_t format, uint32_t ordinal, uint16_t layer, uint16_t filled) {
        Seal seal{};
        kvseal::advance(&seal, {nonce, {scope_low, scope_high}, format, ordinal, layer}, 0, filled);
        return nb::bytes(reinterpret_cast<const char*>(&seal), sizeof seal);
    }, nb::arg("nonce"), nb::arg("scope_low"), nb::arg("scope_high"), nb::arg("format"), nb::arg("ordinal"), nb::arg("layer"), nb::arg("filled"));
    m.def("instruction_set", [](const std::string& isa) { return std::string(kernels_of(isa).name); }, nb::arg("isa") = "auto");

    nb::class_<Arena>(m, "Arena")
        .def(nb::init<int64_t, int64_t>(), nb::arg("pages"), nb::arg("page_bytes"))
        .def_prop_ro("memory", &Arena::memory)
        .def_ro("pages", &Arena::pages)
        .def_ro("page_bytes", &Arena::page_bytes)
        .def("close", [](Arena& self) { self.mapping.reset(); });

    nb::class_<KVLayout>(m, "Layout")
        .def("__init__", [](KVLayout* self, int layers, int kv_heads, int head_dim, int page_tokens, const std::string& kv_dtype, int64_t run_bytes,
                            int64_t element_run_bytes, int64_t section_bytes, int64_t page_bytes, uint64_t format) {
                new (self) KVLayout(make_layout(layers, kv_heads, head_dim, page_tokens, kv_dtype, run_bytes, element_run_bytes, section_bytes, page_bytes, format));
            }, nb::kw_only(), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("page_tokens"), nb::arg("kv_dtype"), nb::arg("run_bytes"),
            nb::arg("element_run_bytes"), nb::arg("section_bytes"), nb::arg("page_bytes"), nb::arg("format"));

    nb::class_<Packed>(m, "PackedLinear")
        .def_prop_ro("rows", [](const Packed& p) { return p.linear.rows; })
        .def_prop_ro("columns", [](const Packed& p) { return p.linear.columns; })
        .def_prop_ro("format", [](const Packed& p) { return std::string(pack_name(p.linear.format)); })
        .def_ro("bytes", &Packed::bytes);

    nb::class_<WeightSlab>(m, "WeightSlab")
        .def(nb::init<int64_t>(), nb::arg("bytes"))
        .def_ro("used_bytes", &WeightSlab::used)
        .def("pack", &WeightSlab::pack, nb::arg("raw"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"), nb::arg("format"),
             nb::arg("row_order") = nb::none());
    m.def("packed_bytes", [](const std::string& format, int64_t rows, int64_t columns) { return packed_bytes(pack_format(format), rows, columns); },
          nb::arg("format"), nb::arg("rows"), nb::arg("columns"));
    m.def("dequantise", [](In<uint8_t, 1> raw, const std::string& type, InOut<float, 2> out) {
        const SourceType source = source_type(type);
        const int64_t columns = static_cast<int64_t>(out.shape(1)), row_bytes = source_row_bytes(source, columns);
        require(static_cast<int64_t>(raw.size()) == row_bytes * static_cast<int64_t>(out.shape(0)), "raw bytes do not match out");
        for (int64_t r = 0; r < static_cast<int64_t>(out.shape(0)); ++r) dequantise_row(source, raw.data() + r * row_bytes, columns, out.data() + r * columns);
    }, nb::arg("raw"), nb::arg("type"), nb::arg("out").noconvert());

    nb::class_<ModelNumbers>(m, "ModelNumbers")
        .def(nb::init<>())
        .def_rw("vocab_size", &ModelNumbers::vocab_size)
        .def_rw("hidden_size", &ModelNumbers::hidden_size)
        .def_rw("intermediate_size", &ModelNumbers::intermediate_size)
        .def_rw("layers", &ModelNumbers::layers)
        .def_rw("heads", &ModelNumbers::heads)
        .def_rw("kv_heads", &ModelNumbers::kv_heads)
        .def_rw("head_dim", &ModelNumbers::head_dim)
        .def_rw("norm_eps", &ModelNumbers::norm_eps)
        .def_rw("rope_magnitude", &ModelNumbers::rope_magnitude)
        .def_rw("attention_scale", &ModelNumbers::attention_scale)
        .def_rw("embedding_multiplier", &ModelNumbers::embedding_multiplier)
        .def_rw("residual_multiplier", &ModelNumbers::residual_multiplier)
        .def_rw("logits_divisor", &ModelNumbers::logits_divisor)
        .def_rw("inverse_frequencies", &ModelNumbers::inverse_frequencies)
        .def_rw("windows", &ModelNumbers::windows)
        .def_rw("nope_layers", &ModelNumbers::nope_layers);

    nb::class_<Layer>(m, "Layer")
        .def("__init__", [](Layer* self, const Packed& q, const Packed& k, const Packed& v, const Packed& o, const Packed& gate, const Packed& up,
                            const Packed& down, In<float, 1> attn_norm, In<float, 1> mlp_norm, MaybeVector q_bias, MaybeVector k_bias, MaybeVector v_bias,
                            MaybeVector o_bias, MaybeVector gate_bias, MaybeVector up_bias, MaybeVector down_bias, MaybeVector q_norm, MaybeVector k_norm) {
                new (self) Layer{{q.linear, k.linear, v.linear, o.linear, gate.linear, up.linear, down.linear, vector_of(attn_norm), vector_of(mlp_norm),
                                  vector_of(q_bias), vector_of(k_bias), vector_of(v_bias), vector_of(o_bias), vector_of(gate_bias), vector_of(up_bias),
                                  vector_of(down_bias), vector_of(q_norm), vector_of(k_norm)},
                                 {q.mapping, k.mapping, v.mapping, o.mapping, gate.mapping, up.mapping, down.mapping}};
            }, nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("attn_norm"),
            nb::arg("mlp_norm"), nb::arg("q_bias") = nb::none(), nb::arg("k_bias") = nb::none(), nb::arg("v_bias") = nb::none(), nb::arg("o_bias") = nb::none(),
            nb::arg("gate_bias") = nb::none(), nb::arg("up_bias") = nb::none(), nb::arg("down_bias") = nb::none(), nb::arg("q_norm") = nb::none(),
            nb::arg("k_norm") = nb::none());

    nb::class_<NativeDecoder>(m, "Decoder")
        .def("__init__", [](NativeDecoder* self, const ModelNumbers& numbers, const KVLayout& layout, const Arena& arena, const std::vector<Layer*>& layers,
                            In<float, 1> final_norm, const Packed& lm_head, In<uint8_t, 1> embedding, const std::string& embedding_type,
                            std::optional<In<int32_t, 1>> embedding_order, int threads, const std::string& isa) {
                new (self) NativeDecoder(make_decoder(numbers, layout, arena, layers, final_norm, lm_head, embedding, embedding_type, embedding_order, threads, isa));
            }, nb::kw_only(), nb::arg("numbers"), nb::arg("layout"), nb::arg("arena"), nb::arg("layers"), nb::arg("final_norm"),
             nb::arg("lm_head"), nb::arg("embedding"), nb::arg("embedding_type"), nb::arg("embedding_order") = nb::none(), nb::arg("threads") = 1,
             nb::arg("isa") = "auto")
        .def("forward", &forward, nb::kw_only(), nb::arg("tokens"), nb::arg("row_offsets"), nb::arg("start_positions"), nb::arg("tables"), nb::arg("scopes"),
             nb::arg("hidden_counts"), nb::arg("ledger_nonces"), nb::arg("hidden").noconvert())
        .def("logits", &logits, nb::arg("hidden"), nb::arg("out").noconvert())
        .def("seal_digests", &seal_digests, nb::arg("pages"), nb::arg("folds").noconvert())
        .def_prop_ro("instruction_set", [](const NativeDecoder& d) { return std::string(d.get().kernels().name); })
        .def_prop_ro("threads", [](const NativeDecoder& d) { return d.get().threads(); });

    m.def("linear", &linear_kernel, nb::arg("packed"), nb::arg("x"), nb::arg("out").noconvert(), nb::arg("bias") = nb::none(), nb::arg("isa") = "auto");
    m.def("rms_norm", [](In<float, 2> x, In<float, 1> weight, float eps, InOut<float, 2> out, const std::string& isa) {
        require(weight.size() == x.shape(1) && out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "weight or out have the wrong shape");
        for (size_t i = 0; i < x.shape(0); ++i)
            kernels_of(isa).rms_norm(x.data() + i * x.shape(1), weight.data(), static_cast<int>(x.shape(1)), eps, out.data() + i * x.shape(1));
    }, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out").noconvert(), nb::arg("isa") = "auto");
    m.def("rope", [](InOut<float, 3> x, In<float, 2> cosines, In<float, 2> sines, const std::string& isa) {
        const size_t half = cosines.shape(1);
        require(cosines.shape(0) == x.shape(0) && sines.shape(0) == x.shape(0) && sines.shape(1) == half && 2 * half <= x.shape(2), "cosines or sines have the wrong shape");
        for (size_t t = 0; t < x.shape(0); ++t)
            kernels_of(isa).rope(x.data() + t * x.shape(1) * x.shape(2), static_cast<int>(x.shape(1)), static_cast<int>(x.shape(2)), static_cast<int>(half),
                                 cosines.data() + t * half, sines.data() + t * half);
    }, nb::arg("x").noconvert(), nb::arg("cosines"), nb::arg("sines"), nb::arg("isa") = "auto");
    m.def("silu_multiply", [](In<float, 1> gate, In<float, 1> up, InOut<float, 1> out, const std::string& isa) {
        require(up.size() == gate.size() && out.size() == gate.size(), "gate, up and out must have one length");
        kernels_of(isa).silu_multiply(gate.data(), up.data(), static_cast<int>(gate.size()), out.data());
    }, nb::arg("gate"), nb::arg("up"), nb::arg("out").noconvert(), nb::arg("isa") = "auto");
    m.def("exponential", [](In<float, 1> x, InOut<float, 1> out, const std::string& isa) {
        require(out.size() == x.size(), "x and out must have one length");
        kernels_of(isa).exponential(x.data(), static_cast<int>(x.size()), out.data());
    }, nb::arg("x"), nb::arg("out").noconvert(), nb::arg("isa") = "auto");
    m.def("append", &append_kernel, nb::kw_only(), nb::arg("arena"), nb::arg("layout"), nb::arg("layer"), nb::arg("row_offsets"), nb::arg("start_positions"),
          nb::arg("tables"), nb::arg("scopes"), nb::arg("ledger_nonces"), nb::arg("k"), nb::arg("v"), nb::arg("isa") = "auto");
    m.def("attend", &attend_kernel, nb::kw_only(), nb::arg("arena"), nb::arg("layout"), nb::arg("layer"), nb::arg("row_offsets"), nb::arg("start_positions"),
          nb::arg("tables"), nb::arg("scopes"), nb::arg("q"), nb::arg("out").noconvert(), nb::arg("scale"), nb::arg("window") = 0, nb::arg("by_partition") = false,
          nb::arg("isa") = "auto");
    m.def("digest", [](In<uint8_t, 1> data, uint64_t seed) {
        require(data.size() % 64 == 0, "digests are taken of whole 64-byte lines");
        const Digest d = digest_of(data.data(), data.size(), seed);
        return nb::bytes(reinterpret_cast<const char*>(&d), 16);
    }, nb::arg("data"), nb::arg("seed"));

    m.def("argmax", [](In<float, 1> row) {
        require(row.size() > 0, "an empty row");
        return argmax(row.data(), static_cast<int64_t>(row.size()));
    }, nb::arg("row"));
    m.def("log_sum_exp", [](In<float, 1> row) {
        require(row.size() > 0, "an empty row");
        return log_sum_exp(row.data(), static_cast<int64_t>(row.size()));
    }, nb::arg("row"));
    m.def("top_k", [](In<float, 1> row, int64_t k) { return top_k(row.data(), static_cast<int64_t>(row.size()), k); }, nb::arg("row"), nb::arg("k"));
}
