// One step of the model: new tokens in, hidden states and broken seals out.
//
// Owns the layer loop, the activations and the division of work. Every payload access goes through the kernels' seal checks (L3-L7, L10);
// a row that breaks a seal is flagged, writes nothing more, and no other row changes by a bit (L12, L13). Never allocates pages, never
// samples, never decides what runs.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "company.h"
#include "kernels.h"
#include "memory.h"
#include "pack.h"
#include "pages.h"
#include "threads.h"

namespace kvseal {

struct ModelNumbers {
    int vocab_size = 0, hidden_size = 0, intermediate_size = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
    float norm_eps = 1e-5f, rope_magnitude = 1.0f, attention_scale = 0.0f;
    float embedding_multiplier = 1.0f, residual_multiplier = 1.0f, logits_divisor = 1.0f;
    std::vector<float> inverse_frequencies;
    std::vector<int> windows;         // per layer; 0 = full attention
    std::vector<uint8_t> nope_layers; // per layer; 1 = no rotary embedding
};

using Vector = std::vector<float>;  // empty = absent

struct LayerParts {
    Linear q, k, v, o, gate, up, down;
    Vector attn_norm, mlp_norm;
    Vector q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias, q_norm, k_norm;
};

struct Embedding {
    SourceType type = SRC_F32;
    const uint8_t* raw = nullptr;
    int64_t row_bytes = 0;
    const int32_t* row_order = nullptr;
};

struct Step {
    const int32_t* tokens = nullptr;
    int total_tokens = 0;
    std::vector<Row> rows;
    const int32_t* hidden_counts = nullptr;
    const uint64_t* ledger_nonces = nullptr;
    float* hidden = nullptr;
};

// Activations of all tokens of a step in the forms that the next linear layers read.
struct Activations {
    int width = 0, groups = 0;
    bool want_quants = false;
    std::vector<float> values, scales, scaled_sums, outliers;
    std::vector<int8_t> quants;
    std::vector<int32_t> quant_sums, outlier_counts;
    std::vector<uint8_t> outlier_columns;
    std::vector<OutlierColumn> listed;

    void resize(int tokens);
    // After all groups of a token block are rounded.
    void list_outliers(int token_block, int tokens);
    Inputs inputs() const;
    Groups groups_of(int64_t token, int first_group = 0);
};

class Decoder {
  public:
    // Throws std::invalid_argument when sizes contradict each other.
    Decoder(ModelNumbers numbers, KVLayout kv, std::vector<LayerParts> layers, Vector final_norm, Linear lm_head, Embedding embedding,
            int threads, const Kernels& kernels);

    std::vector<Break> forward(const Step& step);
    void logits(const float* hidden, int rows, float* out);
    // Digests full pages, writes each layer's digest into its seal, folds[i] = 16 bytes of page i. Returns false if a page is not full.
    bool seal_digests(const int32_t* pages, int count, uint8_t* folds);

    const ModelNumbers& numbers() const { return m_; }
    const KVLayout& kv() const { return kv_; }
    const Kernels& kernels() const { return k_; }
    int threads() const { return team_.size(); }
    Team& team() { return team_; }  // for other work of the same thread between two steps

  private:
    struct AttendUnit {
        int row, kv_head, heads, token, tokens;  // token: first of the unit, counted within the row
        int partition;                           // -1: all of them
        int64_t partial;                         // place in partials_
    };
    struct Heads {
        bool queries, keys;  // keys: and values
    };
    static constexpr int FEW_TOKENS = 4;  // sharing out so few costs more than it gains
    struct LinearPlan {
        const Linear* w;
        const Inputs* in;
        Outputs out;
    };

    void prepare(const Step& step);
    void plan_attention();
    void run_layers();
    void narrow();
    template <class Body>
    void each_token(Body&& body);
    template <class Body>
    void each_block(int tokens, Activations& to, Body&& body);
    void project_heads(int layer, Heads heads);
    void project_out(int layer);
    int64_t linear_units(const Linear& w) const;
    void linear_unit(const LinearPlan& plan, int64_t unit) const;
    void next_is(const Linear* layer);
    bool fetch_ahead(int thread, int turn) const;
    void gate_up_unit(const LayerParts& layer, const Inputs& x, int64_t unit, int thread);

    void embed(int token);
    void norm_into(int token, const Vector& weight, Activations& to);
    void finish_heads(int layer, int token, Heads heads);
    void attend(int layer);
    bool windowed(int layer) const { return !m_.windows.empty() && m_.windows[static_cast<size_t>(layer)] > 0; }
    AttendWork attend_work(int layer, int thread, int row, int kv_head);
    void attend_unit(int layer, int thread, const AttendUnit& unit);
    void attend_company(int layer, int thread, const Company::Unit& unit);
    void finish_attention(int token);
    void round(int token, Activations& a);
    void finish_hidden(int token);

    ModelNumbers m_;
    KVLayout kv_;
    std::vector<LayerParts> layers_;
    Vector final_norm_;
    Linear lm_head_;
    Embedding embedding_;
    const Kernels& k_;
    PageGuard guard_;

    // The linear layer that the step comes to next: a worker that waits for a single token asks memory for its part of it.
    std::atomic<const Linear*> ahead_{nullptr};

    // The step in progress.
    const Step* step_ = nullptr;
    int tokens_ = 0, hidden_tokens_ = 0;  // narrow() leaves the tokens whose state is asked for
    std::vector<Row> rows_;
    std::vector<int> row_of_, position_of_, hidden_slot_;
    std::vector<AttendUnit> attend_units_;
    Company company_;
    std::vector<float> hidden_, q_, key_, value_, cosines_, sines_, partials_;
    std::vector<std::vector<float>> scratch_, gated_;  // of each thread
    Activations x_, attended_, act_, head_;

    Team team_;  // last: its threads end before what they read
};

}  // namespace kvseal
