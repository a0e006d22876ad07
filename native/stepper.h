// A step in which everybody decodes, from rows as the scheduler makes them to tokens, in one call.
//
// Owns the reading of `core.batch.Row` tuples and the order forward, digests, logits, draw: what exec/runner.py does for every step, for
// the one kind of step there is most of. Between two steps the kernels have driven everything else out of the caches, so each line of
// Python there costs many times what it costs in a loop of its own. Leaves every other kind of step to the runner.
#pragma once
#include <chrono>
#include <cstring>
#include <unordered_map>

#include "bindings.h"
#include "sampler.h"

namespace kvseal {
namespace binding {

// The ids of one request's history, locked against resizing while they are read.
class History {
  public:
    explicit History(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
        const bool words = view_.itemsize == 4 && view_.format != nullptr && view_.format[0] == 'I';
        if (!words) PyBuffer_Release(&view_);
        require(words, "a history is an array of typecode 'I'");
    }
    ~History() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }
    History(History&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    History(const History&) = delete;
    History& operator=(const History&) = delete;

    const uint32_t* ids() const { return static_cast<const uint32_t*>(view_.buf); }
    int64_t size() const { return view_.len / 4; }
    void require_below(int64_t vocab) const {
        for (int64_t t = 0; t < size(); ++t) require(ids()[t] < static_cast<uint64_t>(vocab), "a history holds an id outside the vocabulary");
    }

  private:
    Py_buffer view_{};
};

inline void require_known(const Sampling& s, int64_t vocab) {
    const auto known = [vocab](int32_t id) { return id >= 0 && id < vocab; };
    for (const auto& entry : s.bias) require(known(entry.first), "a biased id is outside the vocabulary");
    for (int32_t id : s.allowed_ids) require(known(id), "an allowed id is outside the vocabulary");
    for (int32_t id : s.stop_ids) require(known(id), "a stop id is outside the vocabulary");
}

inline nb::object as_python(const Logprobs& found) {
    if (!found.finite) return nb::none();
    nb::list top;
    for (const auto& [id, logprob] : found.top) top.append(nb::make_tuple(id, logprob));
    return nb::make_tuple(found.token, nb::tuple(top));
}

inline nb::object as_python(const Sampling& how, const Drawn& drawn) {
    if (how.logprobs < 0 || drawn.token < 0) return nb::int_(drawn.token);
    return nb::make_tuple(drawn.token, as_python(drawn.logprobs));
}

class Stepper {
  public:
    // native_of(SamplingParams) -> Sampling; point_of(SamplingParams, output index) -> float.
    Stepper(Decoder& decoder, int page_tokens, nb::object native_of, nb::object point_of)
        : decoder_(decoder), sampler_(decoder.team(), decoder.kernels(), decoder.numbers().vocab_size), page_tokens_(page_tokens),
          native_of_(std::move(native_of)), point_of_(std::move(point_of)) {}

    // None: not a step of this kind, and nothing has happened. Else (answers, breaks, digests): an answer for each row (a token, or
    // (token, logprobs)), meaningless where the row broke a seal; digests (row, 16 bytes) of the pages that became full, or
    // None when a page that should be full is not.
    nb::object decode(nb::tuple rows, In<uint64_t, 1> ledger_nonces) {
        const size_t n = nb::len(rows);
        require(static_cast<int64_t>(ledger_nonces.size()) == decoder_.kv().pages, "ledger_nonces needs one entry per page of the arena");
        if (n == 0 || !all_decode(rows)) return nb::none();
        nb::list tables;
        for (size_t i = 0; i < n; ++i) tables.append(item(rows, i, TABLE).attr("stamps"));
        const Tables views(nb::borrow<nb::sequence>(tables));
        std::vector<History> histories;
        histories.reserve(n);
        read(rows, views, histories);
        if (sampling_.size() > 2 * n + 64) forget(rows);
        hidden_.resize(n * static_cast<size_t>(decoder_.numbers().hidden_size));
        step_.tokens = tokens_.data();
        step_.total_tokens = static_cast<int>(n);
        step_.hidden_counts = ones_.data();
        step_.ledger_nonces = ledger_nonces.data();
        step_.hidden = hidden_.data();
        bool full = true;
        {
            nb::gil_scoped_release unlocked;
            in_kernels([&] { breaks_ = decoder_.forward(step_); });
            full = digest();
            draw();
        }
        return results(n, full);
    }

    // Of layers and logits, all steps so far: what a step costs beyond them is for the benchmarks to say.
    double kernel_seconds() const { return kernel_seconds_; }

  private:
    enum Field { TOKENS = 1, START, TABLE, SAMPLING, SAMPLES, HISTORY, PROMPT_TOKENS };
    static constexpr int64_t LOGITS_ROWS = 64;  // as in exec/runner.py

    static nb::handle item(const nb::tuple& rows, size_t row, Field field) {
        return PyTuple_GET_ITEM(PyTuple_GET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(row)), field);
    }

    template <class Kernel>
    void in_kernels(Kernel&& kernel) {
        const auto began = std::chrono::steady_clock::now();
        kernel();
        kernel_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    }

    static bool all_decode(const nb::tuple& rows) {
        for (size_t i = 0; i < nb::len(rows); ++i) {
            PyObject* row = PyTuple_GET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(i));
            require(PyTuple_Check(row) && PyTuple_GET_SIZE(row) == 8, "a row has eight fields");
            PyObject* tokens = PyTuple_GET_ITEM(row, TOKENS);
            if (!PyTuple_CheckExact(tokens) || PyTuple_GET_SIZE(tokens) != 1 || PyTuple_GET_ITEM(row, SAMPLES) != Py_True) return false;
            if (nb::cast<int64_t>(item(rows, i, START)) < nb::cast<int64_t>(item(rows, i, PROMPT_TOKENS))) return false;  // the prompt's last token
        }
        return true;
    }

    void read(const nb::tuple& rows, const Tables& views, std::vector<History>& histories) {
        const size_t n = nb::len(rows);
        const int64_t vocab = sampler_.vocab();
        tokens_.resize(n);
        step_.rows.resize(n);
        draws_.assign(n, Draw());
        while (ones_.size() < n) ones_.push_back(1);
        for (size_t i = 0; i < n; ++i) {
            const int64_t token = nb::cast<int64_t>(nb::handle(PyTuple_GET_ITEM(item(rows, i, TOKENS).ptr(), 0)));
            const int64_t start = nb::cast<int64_t>(item(rows, i, START)), prompt_tokens = nb::cast<int64_t>(item(rows, i, PROMPT_TOKENS));
            require(token >= 0 && token < vocab, "a token id is outside the vocabulary");
            require(start >= 0 && start < INT32_MAX, "a start position is negative or too large");
            tokens_[i] = static_cast<int32_t>(token);
            Row& row = step_.rows[i];
            row.stamps = views.stamps(i);
            row.table_pages = views.pages(i);
            row.first_token = static_cast<int32_t>(i);
            row.count = 1;
            row.start = static_cast<int32_t>(start);
            const nb::object scope = item(rows, i, TABLE).attr("scope");
            require(PyBytes_Check(scope.ptr()) && PyBytes_GET_SIZE(scope.ptr()) == 16, "a scope has 16 bytes");
            std::memcpy(row.scope, PyBytes_AS_STRING(scope.ptr()), 16);
            Draw& draw = draws_[i];
            draw.how = &sampling_of(item(rows, i, SAMPLING));
            draw.prompt_tokens = prompt_tokens;
            draw.output_index = start + 1 - prompt_tokens;
            if (draw.how->temperature > 0.0) draw.point = nb::cast<double>(point_of_(item(rows, i, SAMPLING), draw.output_index));
            if (!draw.how->penalises()) continue;
            histories.emplace_back(item(rows, i, HISTORY));
            histories.back().require_below(vocab);
            draw.history = histories.back().ids();
            draw.history_tokens = histories.back().size();
        }
    }

    // Made once for each request; the parameters are held, so that their address is theirs alone.
    const Sampling& sampling_of(nb::handle params) {
        const auto known = sampling_.find(params.ptr());
        if (known != sampling_.end()) return known->second.second;
        const Sampling made = nb::cast<Sampling>(native_of_(params));
        require_known(made, sampler_.vocab());
        return sampling_.emplace(params.ptr(), std::make_pair(nb::borrow<nb::object>(params), made)).first->second.second;
    }

    void forget(const nb::tuple& rows) {
        std::unordered_map<PyObject*, std::pair<nb::object, Sampling>> kept;
        for (size_t i = 0; i < nb::len(rows); ++i) {
            auto found = sampling_.extract(item(rows, i, SAMPLING).ptr());
            if (!found.empty()) {
                kept.insert(std::move(found));  // A node moves whole: what draws_ points to stays where it is.
            }
        }
        sampling_ = std::move(kept);
    }

    bool broke(size_t row) const {
        for (const Break& found : breaks_)
            if (found.row == static_cast<int>(row)) return true;
        return false;
    }

    // Of every page that its row has just filled; false when one is not full.
    bool digest() {
        filled_.clear();
        pages_.clear();
        for (size_t i = 0; i < step_.rows.size(); ++i) {
            const Row& row = step_.rows[i];
            if ((row.start + 1) % page_tokens_ != 0 || (!breaks_.empty() && broke(i))) continue;
            filled_.push_back(static_cast<int>(i));
            pages_.push_back(static_cast<int32_t>(row.page(row.start / page_tokens_)));
        }
        folds_.resize(16 * pages_.size());
        return pages_.empty() || decoder_.seal_digests(pages_.data(), static_cast<int>(pages_.size()), folds_.data());
    }

    void draw() {
        const int64_t n = static_cast<int64_t>(draws_.size()), width = decoder_.numbers().hidden_size;
        drawn_.resize(draws_.size());
        for (int64_t first = 0; first < n; first += LOGITS_ROWS) {
            const int64_t some = std::min(LOGITS_ROWS, n - first);
            logits_.resize(std::max(logits_.size(), static_cast<size_t>(some * sampler_.vocab())));
            in_kernels([&] { decoder_.logits(hidden_.data() + first * width, static_cast<int>(some), logits_.data()); });
            block_.assign(draws_.begin() + first, draws_.begin() + first + some);
            sampler_.draw(logits_.data(), block_, block_drawn_);
            std::move(block_drawn_.begin(), block_drawn_.end(), drawn_.begin() + first);
        }
    }

    nb::object results(size_t n, bool full) const {
        nb::list answers, digests;
        for (size_t i = 0; i < n; ++i) answers.append(as_python(*draws_[i].how, drawn_[i]));
        for (size_t i = 0; i < filled_.size(); ++i)
            digests.append(nb::make_tuple(filled_[i], nb::bytes(reinterpret_cast<const char*>(folds_.data() + 16 * i), 16)));
        return nb::make_tuple(answers, nb::cast(as_tuples(breaks_)), full ? nb::object(digests) : nb::none());
    }

    Decoder& decoder_;
    Sampler sampler_;
    const int page_tokens_;
    nb::object native_of_, point_of_;
    double kernel_seconds_ = 0.0;
    std::unordered_map<PyObject*, std::pair<nb::object, Sampling>> sampling_;

    // The step in progress.
    Step step_;
    std::vector<int32_t> tokens_, ones_, pages_;
    std::vector<int> filled_;
    std::vector<uint8_t> folds_;
    std::vector<float> hidden_, logits_;
    std::vector<Break> breaks_;
    std::vector<Draw> draws_, block_;
    std::vector<Drawn> drawn_, block_drawn_;
};

}  // namespace binding
}  // namespace kvseal
