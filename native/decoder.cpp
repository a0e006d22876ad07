#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "digest.h"

namespace kvseal {
namespace {

constexpr int UNIT_BLOCKS = 4;   // row blocks of a linear unit
constexpr int UNIT_ROWS = UNIT_BLOCKS * ROW_BLOCK;
constexpr int UNIT_TOKENS = 64;  // tokens of a linear unit
constexpr int HEAD_BLOCKS = 32;  // row blocks of a unit of the output projection

int ceil_div(int a, int b) { return (a + b - 1) / b; }

void require(bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
}

const float* or_null(const Vector& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

void Activations::resize(int tokens) {
    groups = ceil_div(width, GROUP);
    const size_t n = static_cast<size_t>(ceil_div(tokens, TOKEN_BLOCK) * TOKEN_BLOCK), grouped = n * static_cast<size_t>(groups);
    const auto grow = [](auto& numbers, size_t count) {
        if (numbers.size() < count) numbers.resize(count);
    };
    grow(values, n * static_cast<size_t>(width));
    if (!want_quants) return;
    grow(quants, grouped * GROUP);
    for (auto* floats : {&scales, &scaled_sums, &outliers}) grow(*floats, grouped);
    grow(quant_sums, grouped);
    grow(outlier_columns, grouped);
    grow(listed, grouped);
    grow(outlier_counts, n / TOKEN_BLOCK);
}

void Activations::list_outliers(int token_block, int tokens) {
    const size_t first = static_cast<size_t>(token_block) * static_cast<size_t>(groups) * TOKEN_BLOCK;
    const int begin = token_block * TOKEN_BLOCK, present = std::min(TOKEN_BLOCK, tokens - begin);
    OutlierColumn* next = listed.data() + first;
    for (int g = 0; g < groups; ++g) {
        const size_t at = first + static_cast<size_t>(g) * TOKEN_BLOCK;
        unsigned left = 0;  // tokens whose outlier is not listed yet
        for (int t = 0; t < present; ++t) left |= (outliers[at + static_cast<size_t>(t)] != 0.0f ? 1U : 0U) << t;
        for (; left != 0; ++next) {
            const uint8_t column = outlier_columns[at + static_cast<size_t>(__builtin_ctz(left))];
            *next = {{}, static_cast<uint16_t>(g), column, 0};
            for (unsigned t = 0; t < TOKEN_BLOCK; ++t) {
                if ((left >> t & 1U) == 0 || outlier_columns[at + t] != column) continue;
                next->values[t] = outliers[at + t];
                next->tokens = static_cast<uint8_t>(next->tokens | 1U << t);
            }
            left &= ~static_cast<unsigned>(next->tokens);
        }
    }
    outlier_counts[static_cast<size_t>(token_block)] = static_cast<int32_t>(next - (listed.data() + first));
}

Groups Activations::groups_of(int64_t token, int first_group) {
    const int64_t at = (token / TOKEN_BLOCK * groups + first_group) * TOKEN_BLOCK + token % TOKEN_BLOCK;
    return {quants.data() + at * GROUP, scales.data() + at,   quant_sums.data() + at,
            scaled_sums.data() + at,    outliers.data() + at, outlier_columns.data() + at};
}

Inputs Activations::inputs() const {
    return {values.data(), quants.data(), scales.data(), quant_sums.data(), scaled_sums.data(), listed.data(), outlier_counts.data(), width};
}

Decoder::Decoder(ModelNumbers numbers, KVLayout kv, std::vector<LayerParts> layers, Vector final_norm, Linear lm_head, Embedding embedding,
                 int threads, const Kernels& kernels)
    : m_(std::move(numbers)), kv_(kv), layers_(std::move(layers)), final_norm_(std::move(final_norm)), lm_head_(lm_head),
      embedding_(embedding), k_(kernels), guard_(kv), team_(threads, [this](int thread, int turn) { return fetch_ahead(thread, turn); }) {
    const int q_rows = m_.heads * m_.head_dim, kv_rows = m_.kv_heads * m_.head_dim, half = static_cast<int>(m_.inverse_frequencies.size());
    require(m_.head_dim % 8 == 0 && m_.head_dim <= 512, "head_dim must be a multiple of 8, at most 512");
    require(m_.kv_heads > 0 && m_.heads % m_.kv_heads == 0, "heads must be a multiple of kv_heads");
    require(2 * half <= m_.head_dim, "rotary_dims exceeds head_dim");
    require(kv_.layers == m_.layers && kv_.kv_heads == m_.kv_heads && kv_.head_dim == m_.head_dim, "geometry and model disagree");
    require(PARTITION_TOKENS % kv_.page_tokens == 0 && kv_.page_tokens % 8 == 0, "page_tokens must be 8, 16, 32 or 64");
    require(static_cast<int>(layers_.size()) == m_.layers, "layers missing");
    require(m_.windows.empty() || static_cast<int>(m_.windows.size()) == m_.layers, "windows: one per layer");
    require(m_.nope_layers.empty() || static_cast<int>(m_.nope_layers.size()) == m_.layers, "nope_layers: one per layer");
    require(static_cast<int>(final_norm_.size()) == m_.hidden_size, "final_norm");
    const auto shaped = [](const Linear& w, int rows, int columns, const char* name) {
        require(w.rows == rows && w.columns == columns, std::string(name) + " has the wrong shape");
    };
    const auto long_as = [](const Vector& v, int n, bool optional, const char* name) {
        require(static_cast<int>(v.size()) == n || (optional && v.empty()), std::string(name) + " has the wrong length");
    };
    const auto wants = [](Activations& a, std::initializer_list<const Linear*> users) {
        for (const Linear* w : users) a.want_quants |= w->quantised();
    };
    x_.width = head_.width = m_.hidden_size;
    attended_.width = q_rows;
    act_.width = m_.intermediate_size;
    for (const LayerParts& l : layers_) {
        shaped(l.q, q_rows, m_.hidden_size, "q");
        shaped(l.k, kv_rows, m_.hidden_size, "k");
        shaped(l.v, kv_rows, m_.hidden_size, "v");
        shaped(l.o, m_.hidden_size, q_rows, "o");
        shaped(l.gate, m_.intermediate_size, m_.hidden_size, "gate");
        shaped(l.up, m_.intermediate_size, m_.hidden_size, "up");
        shaped(l.down, m_.hidden_size, m_.intermediate_size, "down");
        long_as(l.attn_norm, m_.hidden_size, false, "attn_norm");
        long_as(l.mlp_norm, m_.hidden_size, false, "mlp_norm");
        long_as(l.q_bias, q_rows, true, "q_bias");
        long_as(l.k_bias, kv_rows, true, "k_bias");
        long_as(l.v_bias, kv_rows, true, "v_bias");
        long_as(l.o_bias, m_.hidden_size, true, "o_bias");
        long_as(l.gate_bias, m_.intermediate_size, true, "gate_bias");
        long_as(l.up_bias, m_.intermediate_size, true, "up_bias");
        long_as(l.down_bias, m_.hidden_size, true, "down_bias");
        long_as(l.q_norm, m_.head_dim, true, "q_norm");
        long_as(l.k_norm, m_.head_dim, true, "k_norm");
        wants(x_, {&l.q, &l.k, &l.v, &l.gate, &l.up});
        wants(attended_, {&l.o});
        wants(act_, {&l.down});
    }
    shaped(lm_head_, m_.vocab_size, m_.hidden_size, "lm_head");
    wants(head_, {&lm_head_});
    gated_.assign(static_cast<size_t>(team_.size()), std::vector<float>(2 * UNIT_TOKENS * UNIT_ROWS));
    scratch_.assign(static_cast<size_t>(team_.size()), std::vector<float>(static_cast<size_t>(attend_scratch_floats(kv_, m_.heads / m_.kv_heads))));
}

// --- a step ---------------------------------------------------------------------------------------------------------------------------

std::vector<Break> Decoder::forward(const Step& step) {
    prepare(step);
    run_layers();
    step_ = nullptr;
    return guard_.take();
}

void Decoder::prepare(const Step& step) {
    step_ = &step;
    tokens_ = step.total_tokens;
    const size_t n = static_cast<size_t>(tokens_), rows = step.rows.size();
    row_of_.resize(n);
    position_of_.resize(n);
    hidden_slot_.resize(n);
    int slot = 0;
    for (size_t r = 0; r < rows; ++r) {
        const Row& row = step.rows[r];
        for (int i = 0; i < row.count; ++i) {
            const size_t t = static_cast<size_t>(row.first_token + i);
            row_of_[t] = static_cast<int>(r);
            position_of_[t] = row.start + i;
            hidden_slot_[t] = i >= row.count - step.hidden_counts[r] ? slot++ : -1;
        }
    }
    hidden_tokens_ = slot;
    guard_.begin(step.rows, step.ledger_nonces);
    rows_ = step.rows;
    const auto fit = [n](std::vector<float>& v, int width) {
        if (v.size() < n * static_cast<size_t>(width)) v.resize(n * static_cast<size_t>(width));
    };
    const int half = static_cast<int>(m_.inverse_frequencies.size());
    fit(hidden_, m_.hidden_size);
    fit(q_, m_.heads * m_.head_dim);
    fit(key_, m_.kv_heads * m_.head_dim);
    fit(value_, m_.kv_heads * m_.head_dim);
    fit(cosines_, half);
    fit(sines_, half);
    x_.resize(tokens_);
    attended_.resize(tokens_);
    act_.resize(tokens_);
    plan_attention();
}

// Work per token: too little to share out when there are few.
template <class Body>
void Decoder::each_token(Body&& body) {
    if (tokens_ > FEW_TOKENS) return team_.share(tokens_, [&](int64_t t, int) { body(static_cast<int>(t)); });
    for (int t = 0; t < tokens_; ++t) body(t);
}

// The same for what the next linear layer reads: by token blocks, whose outliers are listed in the end.
template <class Body>
void Decoder::each_block(int tokens, Activations& to, Body&& body) {
    const auto unit = [&](int64_t block, int) {
        const int begin = static_cast<int>(block) * TOKEN_BLOCK;
        for (int t = begin; t < std::min(begin + TOKEN_BLOCK, tokens); ++t) body(t);
        if (to.want_quants) to.list_outliers(static_cast<int>(block), tokens);
    };
    team_.share(ceil_div(tokens, TOKEN_BLOCK), unit);
}

void Decoder::run_layers() {
    each_token([&](int t) { embed(t); });
    for (int i = 0; i < m_.layers; ++i) {
        const auto norm = [&](int t) { norm_into(t, layers_[static_cast<size_t>(i)].attn_norm, x_); };
        each_block(tokens_, x_, norm);
        guard_.check_append(i);
        if (i + 1 == m_.layers && hidden_tokens_ < tokens_) {
            project_heads(i, {false, true});
            guard_.advance(i);
            narrow();
            each_block(tokens_, x_, norm);
            project_heads(i, {true, false});
        } else {
            project_heads(i, {true, true});
            guard_.advance(i);
        }
        attend(i);
        guard_.collect(i);
        each_block(tokens_, attended_, [&](int t) { finish_attention(t); });
        project_out(i);
    }
    each_token([&](int t) { finish_hidden(t); });
    next_is(nullptr);
}

// Of the last layer only keys and values are needed of all tokens: from there on, the step consists of those whose state is asked for.
void Decoder::narrow() {
    const int half = static_cast<int>(m_.inverse_frequencies.size());
    const auto move = [](std::vector<float>& rows, int width, int from, int to) {
        std::memmove(rows.data() + static_cast<int64_t>(to) * width, rows.data() + static_cast<int64_t>(from) * width, static_cast<size_t>(width) * 4);
    };
    int kept = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
        Row& row = rows_[r];
        const int skipped = row.count - step_->hidden_counts[r], first = row.first_token + skipped;
        row = {row.stamps, row.table_pages, {row.scope[0], row.scope[1]}, kept, row.count - skipped, row.start + skipped};
        for (int i = 0; i < row.count; ++i, ++kept) {
            move(hidden_, m_.hidden_size, first + i, kept);
            move(cosines_, half, first + i, kept);
            move(sines_, half, first + i, kept);
            row_of_[static_cast<size_t>(kept)] = static_cast<int>(r);
            position_of_[static_cast<size_t>(kept)] = row.start + i;
            hidden_slot_[static_cast<size_t>(kept)] = kept;
        }
    }
    tokens_ = kept;
    plan_attention();
}

// What a worker may fetch while it waits: only for so few tokens that memory is the limit.
void Decoder::next_is(const Linear* layer) { ahead_.store(tokens_ <= FEW_TOKENS ? layer : nullptr, std::memory_order_relaxed); }

// --- linear layers --------------------------------------------------------------------------------------------------------------------

void Decoder::project_heads(int layer, Heads heads) {
    const LayerParts& parts = layers_[static_cast<size_t>(layer)];
    const Inputs x = x_.inputs();
    const LinearPlan q{&parts.q, &x, {q_.data(), m_.heads * m_.head_dim, or_null(parts.q_bias), 1.0f, false}};
    const LinearPlan k{&parts.k, &x, {key_.data(), m_.kv_heads * m_.head_dim, or_null(parts.k_bias), 1.0f, false}};
    const LinearPlan v{&parts.v, &x, {value_.data(), m_.kv_heads * m_.head_dim, or_null(parts.v_bias), 1.0f, false}};
    const int64_t q_units = heads.queries ? linear_units(parts.q) : 0, k_units = heads.keys ? linear_units(parts.k) : 0;
    next_is(&parts.o);
    team_.share(q_units + k_units + (heads.keys ? linear_units(parts.v) : 0), [&](int64_t unit, int) {
        if (unit < q_units) return linear_unit(q, unit);
        unit -= q_units;
        unit < k_units ? linear_unit(k, unit) : linear_unit(v, unit - k_units);
    });
    each_token([&](int t) { finish_heads(layer, t, heads); });
}

// From what the heads have attended to into the residual stream, and through the feed-forward part.
void Decoder::project_out(int layer) {
    const LayerParts& parts = layers_[static_cast<size_t>(layer)];
    const Inputs x = x_.inputs(), attended = attended_.inputs(), act = act_.inputs();
    const LinearPlan o{&parts.o, &attended, {hidden_.data(), m_.hidden_size, or_null(parts.o_bias), m_.residual_multiplier, true}};
    next_is(&parts.gate);
    team_.share(linear_units(parts.o), [&](int64_t unit, int) { linear_unit(o, unit); });
    each_block(tokens_, x_, [&](int t) { norm_into(t, parts.mlp_norm, x_); });
    next_is(&parts.down);
    team_.share(linear_units(parts.gate), [&](int64_t unit, int thread) { gate_up_unit(parts, x, unit, thread); });
    each_block(tokens_, act_, [&](int t) { round(t, act_); });
    const LinearPlan down{&parts.down, &act, {hidden_.data(), m_.hidden_size, or_null(parts.down_bias), m_.residual_multiplier, true}};
    next_is(layer + 1 < m_.layers ? &layers_[static_cast<size_t>(layer + 1)].q : &lm_head_);
    team_.share(linear_units(parts.down), [&](int64_t unit, int) { linear_unit(down, unit); });
}

int64_t Decoder::linear_units(const Linear& w) const {
    return static_cast<int64_t>(ceil_div(w.row_blocks, UNIT_BLOCKS)) * ceil_div(tokens_, UNIT_TOKENS);
}

void Decoder::linear_unit(const LinearPlan& plan, int64_t unit) const {
    const int chunks = ceil_div(plan.w->row_blocks, UNIT_BLOCKS);
    const int block = static_cast<int>(unit % chunks) * UNIT_BLOCKS, token = static_cast<int>(unit / chunks) * UNIT_TOKENS;
    k_.linear(*plan.w, *plan.in, token, std::min(token + UNIT_TOKENS, tokens_), block, std::min(block + UNIT_BLOCKS, plan.w->row_blocks),
              plan.out);
}

bool Decoder::fetch_ahead(int thread, int turn) const {
    constexpr int LINES = 8, TURNS = 128;  // 64 KiB in all: what a wait can bring and a second-level cache can hold
    const Linear* w = ahead_.load(std::memory_order_relaxed);
    if (w == nullptr || turn >= TURNS) return false;
    const int64_t bytes = w->element_bytes(), begin = bytes * thread / team_.size() + turn * LINES * 64;
    for (int64_t at = begin; at < begin + LINES * 64 && at < bytes; at += 64) __builtin_prefetch(w->weights + at, 0, 2);
    return true;
}

void Decoder::gate_up_unit(const LayerParts& layer, const Inputs& x, int64_t unit, int thread) {
    const int chunks = ceil_div(layer.gate.row_blocks, UNIT_BLOCKS);
    const int column = static_cast<int>(unit % chunks) * UNIT_ROWS, token = static_cast<int>(unit / chunks) * UNIT_TOKENS;
    const int n = std::min(UNIT_ROWS, m_.intermediate_size - column), tokens = std::min(UNIT_TOKENS, tokens_ - token);
    // Side by side in one small buffer: rows of the whole width would lie at strides that share a few lines of the first-level cache.
    float* gate = gated_[static_cast<size_t>(thread)].data();
    float* up = gate + UNIT_TOKENS * UNIT_ROWS;
    linear_unit({&layer.gate, &x, {gate, UNIT_ROWS, or_null(layer.gate_bias), 1.0f, false, token, column}}, unit);
    linear_unit({&layer.up, &x, {up, UNIT_ROWS, or_null(layer.up_bias), 1.0f, false, token, column}}, unit);
    for (int t = 0; t < tokens; ++t)
        k_.silu_multiply(gate + t * UNIT_ROWS, up + t * UNIT_ROWS, n, act_.values.data() + static_cast<int64_t>(token + t) * act_.width + column);
}

// --- per token ------------------------------------------------------------------------------------------------------------------------

void Decoder::embed(int token) {
    const int id = step_->tokens[token], half = static_cast<int>(m_.inverse_frequencies.size());
    float* h = hidden_.data() + static_cast<int64_t>(token) * m_.hidden_size;
    const int64_t stored = embedding_.row_order != nullptr ? embedding_.row_order[id] : id;
    dequantise_row(embedding_.type, embedding_.raw + stored * embedding_.row_bytes, m_.hidden_size, h);
    if (m_.embedding_multiplier != 1.0f)
        for (int i = 0; i < m_.hidden_size; ++i) h[i] *= m_.embedding_multiplier;
    // The angle is a float32 product, as models are trained with; only its cosine and sine are taken more exactly.
    const float position = static_cast<float>(position_of_[static_cast<size_t>(token)]);
    for (int i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position * m_.inverse_frequencies[static_cast<size_t>(i)]);
        cosines_[static_cast<size_t>(token * half + i)] = static_cast<float>(std::cos(angle)) * m_.rope_magnitude;
        sines_[static_cast<size_t>(token * half + i)] = static_cast<float>(std::sin(angle)) * m_.rope_magnitude;
    }
}

void Decoder::norm_into(int token, const Vector& weight, Activations& to) {
    float* out = to.values.data() + static_cast<int64_t>(token) * to.width;
    k_.rms_norm(hidden_.data() + static_cast<int64_t>(token) * m_.hidden_size, weight.data(), m_.hidden_size, m_.norm_eps, out);
    round(token, to);
}

void Decoder::round(int token, Activations& a) {
    if (a.want_quants) k_.quantise(a.values.data() + static_cast<int64_t>(token) * a.width, a.width, a.groups_of(token));
}

void Decoder::finish_heads(int layer, int token, Heads heads) {
    const LayerParts& parts = layers_[static_cast<size_t>(layer)];
    const int half = static_cast<int>(m_.inverse_frequencies.size());
    const bool turned = m_.nope_layers.empty() || m_.nope_layers[static_cast<size_t>(layer)] == 0;
    const auto finish = [&](float* all, int count, const Vector& norm) {
        float* head = all + static_cast<int64_t>(token) * count * m_.head_dim;
        for (int h = 0; !norm.empty() && h < count; ++h)
            k_.rms_norm(head + h * m_.head_dim, norm.data(), m_.head_dim, m_.norm_eps, head + h * m_.head_dim);
        const int64_t at = static_cast<int64_t>(token) * half;
        if (turned) k_.rope(head, count, m_.head_dim, half, cosines_.data() + at, sines_.data() + at);
    };
    if (heads.queries) finish(q_.data(), m_.heads, parts.q_norm);
    const int r = row_of_[static_cast<size_t>(token)], position = position_of_[static_cast<size_t>(token)];
    if (!heads.keys || guard_.dead(r)) return;
    finish(key_.data(), m_.kv_heads, parts.k_norm);
    const int64_t at = static_cast<int64_t>(token) * m_.kv_heads * m_.head_dim;
    k_.store_kv(kv_, static_cast<int64_t>(rows_[static_cast<size_t>(r)].page(position / kv_.page_tokens)), layer, position % kv_.page_tokens,
                key_.data() + at, value_.data() + at);
}

void Decoder::finish_hidden(int token) {
    const int slot = hidden_slot_[static_cast<size_t>(token)];
    if (slot < 0) return;
    k_.rms_norm(hidden_.data() + static_cast<int64_t>(token) * m_.hidden_size, final_norm_.data(), m_.hidden_size, m_.norm_eps,
                step_->hidden + static_cast<int64_t>(slot) * m_.hidden_size);
}

// --- pages ----------------------------------------------------------------------------------------------------------------------------

bool Decoder::seal_digests(const int32_t* pages, int count, uint8_t* folds) {
    for (int i = 0; i < count; ++i)
        for (int layer = 0; layer < kv_.layers; ++layer)
            if (filled_slots(kv_.seal(pages[i], layer)) != kv_.page_tokens) return false;
    const auto page_unit = [&](int64_t i, int) {
        uint64_t low = 0x9E3779B97F4A7C15ULL, high = 0xD1B54A32D192ED03ULL;
        for (int layer = 0; layer < kv_.layers; ++layer) {
            Seal* seal = kv_.seal(pages[i], layer);
            const Digest digest = CHECKED ? digest_of(kv_.run(pages[i], layer, false), static_cast<size_t>(2 * kv_.run_bytes), kv_.format) : Digest{1, 1};
            seal->digest[0] = digest.low;
            seal->digest[1] = digest.high;
            low = digest_detail::fold(low ^ digest.low, digest_detail::K0 ^ static_cast<uint64_t>(layer)) + digest.high;
            high = digest_detail::fold(high ^ digest.high, digest_detail::K1 ^ static_cast<uint64_t>(layer)) + digest.low;
        }
        std::memcpy(folds + i * 16, &low, 8);
        std::memcpy(folds + i * 16 + 8, &high, 8);
    };
    team_.share(count, page_unit);
    return true;
}

// --- logits ---------------------------------------------------------------------------------------------------------------------------

void Decoder::logits(const float* hidden, int rows, float* out) {
    head_.resize(rows);
    std::memcpy(head_.values.data(), hidden, static_cast<size_t>(rows) * static_cast<size_t>(m_.hidden_size) * 4);
    const Inputs in = head_.inputs();
    const Outputs to{out, m_.vocab_size, nullptr, 1.0f, false};
    const int chunks = ceil_div(lm_head_.row_blocks, HEAD_BLOCKS);
    const auto unit = [&](int64_t u, int) {
        const int block = static_cast<int>(u % chunks) * HEAD_BLOCKS, row = static_cast<int>(u / chunks) * UNIT_TOKENS;
        const int row_end = std::min(row + UNIT_TOKENS, rows), block_end = std::min(block + HEAD_BLOCKS, lm_head_.row_blocks);
        k_.linear(lm_head_, in, row, row_end, block, block_end, to);
        if (m_.logits_divisor == 1.0f) return;
        const int end = std::min(block_end * ROW_BLOCK, m_.vocab_size);
        for (int i = row; i < row_end; ++i)
            for (int column = block * ROW_BLOCK; column < end; ++column) out[static_cast<int64_t>(i) * m_.vocab_size + column] /= m_.logits_divisor;
    };
    each_block(rows, head_, [&](int t) { round(t, head_); });
    team_.share(static_cast<int64_t>(chunks) * ceil_div(rows, UNIT_TOKENS), unit);
}

}  // namespace kvseal
