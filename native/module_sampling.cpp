// The Python face of kvseal._native.Sampling (what a request asks for), Sampler and Stepper.
//
// Owns argument checks: every id is compared with the vocabulary before a row is touched. The GIL is released while rows are drawn.
#include "bindings.h"
#include "stepper.h"

namespace kvseal {
namespace binding {
namespace {

using Ids = std::vector<int32_t>;

Sampling make_sampling(double temperature, int64_t top_k, double top_p, double min_p, double presence, double frequency, double repetition,
                       const Ids& bias_ids, const std::vector<double>& biases, std::optional<Ids> allowed_ids, const Ids& stop_ids, int64_t min_tokens,
                       int logprobs) {
    require(bias_ids.size() == biases.size(), "every biased id needs one bias");
    Sampling s;
    s.temperature = temperature;
    s.top_k = top_k;
    s.top_p = top_p;
    s.min_p = min_p;
    s.presence_penalty = presence;
    s.frequency_penalty = frequency;
    s.repetition_penalty = repetition;
    for (size_t i = 0; i < biases.size(); ++i) s.bias.emplace_back(bias_ids[i], static_cast<float>(biases[i]));
    s.restricted = allowed_ids.has_value();
    if (allowed_ids) {
        require(!allowed_ids->empty(), "no id is allowed");
        s.allowed_ids = std::move(*allowed_ids);
        std::sort(s.allowed_ids.begin(), s.allowed_ids.end());
        s.allowed_ids.erase(std::unique(s.allowed_ids.begin(), s.allowed_ids.end()), s.allowed_ids.end());
    }
    s.stop_ids = stop_ids;
    s.min_tokens = min_tokens;
    s.logprobs = logprobs;
    return s;
}

void require_rows(const Sampler& self, const In<float, 2>& logits, size_t rows) {
    require(logits.shape(0) == rows && static_cast<int64_t>(logits.shape(1)) == self.vocab(), "logits have the wrong shape");
}

// asks: one tuple (Sampling, history or None, prompt_tokens, output_index, point) for each row.
nb::list draw(Sampler& self, In<float, 2> logits, nb::list asks) {
    const size_t rows = nb::len(asks);
    require_rows(self, logits, rows);
    std::vector<Draw> draws(rows);
    std::vector<History> histories;
    histories.reserve(rows);
    for (size_t i = 0; i < rows; ++i) {
        const nb::tuple ask = nb::cast<nb::tuple>(asks[i]);
        require(nb::len(ask) == 5, "an ask has five parts");
        Draw& one = draws[i];
        one.how = nb::cast<const Sampling*>(ask[0]);
        require(one.how != nullptr, "an ask needs a Sampling");
        require_known(*one.how, self.vocab());
        one.prompt_tokens = nb::cast<int64_t>(ask[2]);
        one.output_index = nb::cast<int64_t>(ask[3]);
        one.point = nb::cast<double>(ask[4]);
        require(one.prompt_tokens >= 0 && one.point >= 0.0 && one.point < 1.0, "prompt_tokens or point is out of range");
        if (!one.how->penalises()) continue;
        histories.emplace_back(ask[1]);
        one.history = histories.back().ids();
        one.history_tokens = histories.back().size();
        histories.back().require_below(self.vocab());
    }
    std::vector<Drawn> drawn;
    {
        nb::gil_scoped_release unlocked;
        self.draw(logits.data(), draws, drawn);
    }
    nb::list out;
    for (size_t i = 0; i < rows; ++i) out.append(as_python(*draws[i].how, drawn[i]));
    return out;
}

nb::list greedy(Sampler& self, In<float, 2> logits) {
    static const Sampling plain = [] {
        Sampling s;
        s.temperature = 0.0;
        return s;
    }();
    require_rows(self, logits, logits.shape(0));
    std::vector<Draw> draws(logits.shape(0));
    for (Draw& one : draws) one.how = &plain;
    std::vector<Drawn> drawn;
    {
        nb::gil_scoped_release unlocked;
        self.draw(logits.data(), draws, drawn);
    }
    nb::list out;
    for (const Drawn& one : drawn) out.append(nb::int_(one.token));
    return out;
}

nb::list logprobs(Sampler& self, In<float, 2> logits, const Ids& tokens, int64_t top) {
    require_rows(self, logits, tokens.size());
    for (int32_t id : tokens) require(id >= 0 && id < self.vocab(), "a token is outside the vocabulary");
    std::vector<Logprobs> found;
    {
        nb::gil_scoped_release unlocked;
        self.logprobs(logits.data(), tokens, top, found);
    }
    nb::list out;
    for (const Logprobs& one : found) out.append(as_python(one));
    return out;
}

}  // namespace

void add_sampling(nb::module_& m) {
    m.attr("NOT_FINITE") = static_cast<int64_t>(NOT_FINITE);
    m.attr("RULED_OUT") = static_cast<int64_t>(RULED_OUT);
    nb::class_<Sampling>(m, "Sampling")
        .def("__init__", [](Sampling* self, double temperature, int64_t top_k, double top_p, double min_p, double presence_penalty, double frequency_penalty,
                            double repetition_penalty, const Ids& bias_ids, const std::vector<double>& biases, std::optional<Ids> allowed_ids,
                            const Ids& stop_ids, int64_t min_tokens, int logprobs) {
                new (self) Sampling(make_sampling(temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, bias_ids, biases,
                                                  std::move(allowed_ids), stop_ids, min_tokens, logprobs));
            }, nb::kw_only(), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("presence_penalty"),
            nb::arg("frequency_penalty"), nb::arg("repetition_penalty"), nb::arg("bias_ids"), nb::arg("biases"), nb::arg("allowed_ids").none(),
            nb::arg("stop_ids"), nb::arg("min_tokens"), nb::arg("logprobs"));
    nb::class_<Sampler>(m, "Sampler")  // with threads of its own; Decoder.sampler() is one on the decoder's
        .def("__init__", [](Sampler* self, int64_t vocab, int threads, const std::string& isa) {
                require(vocab >= 1 && vocab <= INT32_MAX && threads >= 1 && threads <= 1024, "vocab or threads is out of range");
                new (self) Sampler(std::make_unique<Team>(threads), kernels_of(isa), vocab);
            }, nb::arg("vocab"), nb::arg("threads") = 1, nb::arg("isa") = "auto")
        .def("draw", &draw, nb::arg("logits"), nb::arg("asks"))
        .def("greedy", &greedy, nb::arg("logits"))
        .def("logprobs", &logprobs, nb::arg("logits"), nb::arg("tokens"), nb::arg("top"));
    nb::class_<Stepper>(m, "Stepper")
        .def("decode", &Stepper::decode, nb::arg("rows"), nb::arg("ledger_nonces"))
        .def_prop_ro("kernel_seconds", &Stepper::kernel_seconds);
}

}  // namespace binding
}  // namespace kvseal
