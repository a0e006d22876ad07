// The Python face of the native part: kvseal._native.
//
// Owns argument checks and lifetimes; computes nothing. Every array is checked for type, order and shape before a pointer leaves here;
// what does not fit raises ValueError or TypeError; an array that is written is never converted. The GIL is released while kernels run.
#include "bindings.h"
#include "stepper.h"

using namespace kvseal;
using namespace kvseal::binding;

namespace {

Vector vector_of(const MaybeVector& v) { return v ? Vector(v->data(), v->data() + v->size()) : Vector(); }

struct Layer {
    LayerParts parts;
    std::vector<std::shared_ptr<const void>> keep;
};

struct NativeDecoder {
    std::unique_ptr<Decoder> decoder;
    std::vector<std::shared_ptr<const void>> keep;
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
    native.keep = {arena.mapping, lm_head.owner};
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

bool fill_packed(Packed& packed, In<uint8_t, 1> raw, const std::string& type, std::optional<In<int32_t, 1>> row_order, MaybeVector importance) {
    const Linear& w = packed.linear;
    const SourceType source = source_type(type);
    require(packed.writable != nullptr, "mapped weights are read-only");
    require(static_cast<int64_t>(raw.size()) == w.rows * source_row_bytes(source, w.columns), "raw bytes do not match rows x columns of this type");
    const int32_t* order = nullptr;
    if (row_order) {
        require(static_cast<int64_t>(row_order->size()) == w.rows, "row_order needs one entry per row");
        order = row_order->data();
        for (int64_t i = 0; i < w.rows; ++i) require(order[i] >= 0 && order[i] < w.rows, "row_order names a row that is not there");
    }
    require(!importance || static_cast<int>(importance->size()) == w.columns, "importance needs one entry per column");
    nb::gil_scoped_release unlocked;
    return pack(source, raw.data(), order, importance ? importance->data() : nullptr, w);
}

Packed place_packed(WeightSlab& slab, int64_t rows, int64_t columns, const std::string& format) {
    require(rows > 0 && columns > 0 && rows < INT32_MAX && columns < INT32_MAX, "rows and columns must be positive");
    return slab.place(pack_format(format), rows, columns);
}

nb::object slab_memory(const WeightSlab& slab) {
    auto* keep = new std::shared_ptr<const void>(slab.owner());
    nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(slab.data(), {static_cast<size_t>(slab.bytes())}, owner));
}

nb::bytes slab_digest(const WeightSlab& slab) {
    Digest found;
    {
        nb::gil_scoped_release unlocked;
        found = slab.digest();
    }
    return nb::bytes(reinterpret_cast<const char*>(&found), sizeof found);
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
    m.def("instruction_sets", &kernel_names);
    m.def("instruction_set", [](const std::string& isa) { return std::string(kernels_of(isa).name); }, nb::arg("isa") = "auto");

    nb::class_<Arena>(m, "Arena")
        .def(nb::init<int64_t, int64_t, bool>(), nb::arg("pages"), nb::arg("page_bytes"), nb::arg("shared") = false)
        .def_prop_ro("memory", &Arena::memory)
        .def_prop_ro("file", &Arena::file)
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
        .def_ro("bytes", &Packed::bytes)
        .def("fill", &fill_packed, nb::arg("raw"), nb::arg("type"), nb::arg("row_order") = nb::none(), nb::arg("importance") = nb::none());

    m.attr("PACK_LAYOUT") = PACK_LAYOUT;
    nb::class_<WeightSlab>(m, "WeightSlab")
        .def(nb::init<int64_t>(), nb::arg("bytes"))
        .def_static("map", [](int file, int64_t offset, int64_t bytes) { return WeightSlab(file, offset, bytes); }, nb::arg("file"), nb::arg("offset"),
                    nb::arg("bytes"))
        .def_prop_ro("size_bytes", &WeightSlab::bytes)
        .def_prop_ro("used_bytes", &WeightSlab::used)
        .def_prop_ro("memory", &slab_memory)
        .def("digest", &slab_digest)
        .def("place", &place_packed, nb::arg("rows"), nb::arg("columns"), nb::arg("format"))
        .def("pack", [](WeightSlab& self, In<uint8_t, 1> raw, const std::string& type, int64_t rows, int64_t columns, const std::string& format,
                        std::optional<In<int32_t, 1>> row_order) {
                WeightSlab after = self;  // Nothing is taken when the arguments are wrong.
                Packed packed = place_packed(after, rows, columns, format);
                fill_packed(packed, raw, type, row_order, std::nullopt);
                self = after;
                return packed;
            }, nb::arg("raw"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"), nb::arg("format"), nb::arg("row_order") = nb::none());
    m.def("packed_bytes", [](const std::string& format, int64_t rows, int64_t columns) { return packed_bytes(pack_format(format), rows, columns); },
          nb::arg("format"), nb::arg("rows"), nb::arg("columns"));

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
                                 {q.owner, k.owner, v.owner, o.owner, gate.owner, up.owner, down.owner}};
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
        .def_prop_ro("threads", [](const NativeDecoder& d) { return d.get().threads(); })
        .def("stepper", [](NativeDecoder& d, int page_tokens, nb::object native_of, nb::object point_of) {
                require(page_tokens == d.get().kv().page_tokens, "page_tokens is not the arena's");
                return std::make_unique<Stepper>(*d.decoder, page_tokens, std::move(native_of), std::move(point_of));
            }, nb::arg("page_tokens"), nb::arg("native_of"), nb::arg("point_of"), nb::keep_alive<0, 1>())
        .def("sampler", [](NativeDecoder& d) { return Sampler(d.decoder->team(), d.get().kernels(), d.get().numbers().vocab_size); }, nb::keep_alive<0, 1>());

    add_kernels(m);
    add_handoff(m);
    add_sampling(m);
}
