// The Python face of the single kernels, for the conformance suite.
//
// Owns their argument checks; computes nothing. The engine itself calls whole steps (module.cpp).
#include "bindings.h"
#include "digest.h"
#include "roofline.h"

namespace kvseal {
namespace binding {
namespace {

// One linear layer at a time, inputs rounded as the engine rounds them, in memory that stays from call to call.
struct LinearCall {
    Activations in;

    void operator()(const Packed& packed, In<float, 2> x, InOut<float, 2> out, MaybeVector bias, const std::string& isa) {
        const Linear& w = packed.linear;
        require(static_cast<int>(x.shape(1)) == w.columns && out.shape(0) == x.shape(0) && static_cast<int>(out.shape(1)) == w.rows, "x or out have the wrong shape");
        require(!bias || static_cast<int>(bias->size()) == w.rows, "bias has the wrong length");
        const Kernels& k = kernels_of(isa);
        const int tokens = static_cast<int>(x.shape(0));
        in.width = w.columns;
        in.want_quants = w.quantised();
        in.resize(tokens);
        nb::gil_scoped_release unlocked;
        std::copy(x.data(), x.data() + x.size(), in.values.data());
        for (int64_t t = 0; w.quantised() && t < tokens; ++t) k.quantise(in.values.data() + t * w.columns, w.columns, in.groups_of(t));
        for (int b = 0; w.quantised() && b * TOKEN_BLOCK < tokens; ++b) in.list_outliers(b, tokens);
        k.linear(w, in.inputs(), 0, tokens, 0, w.row_blocks, {out.data(), w.rows, bias ? bias->data() : nullptr, 1.0f, false});
    }
};

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
                kernels.attend_combine(partials.data(), partitions, group, kv.kind, dims, out.data() + at);
            }
    guard.collect(layer);
    for (size_t r = 0; r < rows.size(); ++r)
        if (guard.dead(static_cast<int>(r))) std::fill(out.data() + rows[r].first_token * stride, out.data() + (rows[r].first_token + rows[r].count) * stride, 0.0f);
    return as_tuples(guard.take());
}

}  // namespace

void add_kernels(nb::module_& m) {
    m.def("dequantise", [](In<uint8_t, 1> raw, const std::string& type, InOut<float, 2> out) {
        const SourceType source = source_type(type);
        const int64_t columns = static_cast<int64_t>(out.shape(1)), row_bytes = source_row_bytes(source, columns);
        require(static_cast<int64_t>(raw.size()) == row_bytes * static_cast<int64_t>(out.shape(0)), "raw bytes do not match out");
        for (int64_t r = 0; r < static_cast<int64_t>(out.shape(0)); ++r) dequantise_row(source, raw.data() + r * row_bytes, columns, out.data() + r * columns);
    }, nb::arg("raw"), nb::arg("type"), nb::arg("out").noconvert());
    nb::class_<LinearCall>(m, "LinearCall").def(nb::init<>()).def("__call__", &LinearCall::operator(), nb::arg("packed"), nb::arg("x"),
                                                                nb::arg("out").noconvert(), nb::arg("bias") = nb::none(), nb::arg("isa") = "auto");
    m.def("linear", [](const Packed& packed, In<float, 2> x, InOut<float, 2> out, MaybeVector bias, const std::string& isa) { LinearCall()(packed, x, out, bias, isa); }, nb::arg("packed"), nb::arg("x"), nb::arg("out").noconvert(), nb::arg("bias") = nb::none(), nb::arg("isa") = "auto");
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

    m.attr("CHECKED") = CHECKED;
    m.def("fma_rate", [](double seconds) {
        nb::gil_scoped_release unlocked;
        return roofline::fma_rate(seconds);
    }, nb::arg("seconds") = 0.02);
    nb::class_<roofline::ReadProbe>(m, "ReadProbe")
        .def("__init__", [](roofline::ReadProbe* self, int64_t bytes) {
            require(bytes >= 4096, "a probe reads at least 4096 bytes");
            new (self) roofline::ReadProbe(bytes);
        }, nb::arg("bytes"))
        .def("read", [](roofline::ReadProbe& self, int threads) {
            require(threads >= 1 && self.bytes() / threads >= 256, "threads must be at least 1 and each have something to read");
            nb::gil_scoped_release unlocked;
            return self.read(threads);
        }, nb::arg("threads"));
}

}  // namespace binding
}  // namespace kvseal
