// Rows of logits become tokens: the sampling steps of exec/sampler.py, one row per unit of work.
//
// Owns the arithmetic of steps 1 to 10 and of logprobs, and the scratch of each thread. Every row depends on its own logits, parameters,
// history and point alone (L13): no sum crosses rows, and every sum has one order. Draws no random numbers: the point comes in.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace kvseal {

struct Sampling {
    double temperature = 1.0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
    int64_t top_k = 0, min_tokens = 0;
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<int32_t> stop_ids;
    std::vector<int32_t> allowed_ids;  // sorted, each once
    bool restricted = false;           // only allowed_ids may be chosen
    int logprobs = -1;                 // < 0: none are wanted

    bool penalises_output() const { return presence_penalty != 0.0 || frequency_penalty != 0.0; }
    bool penalises() const { return penalises_output() || repetition_penalty != 1.0; }
    bool plain_greedy(int64_t output_index) const {
        return temperature == 0.0 && !penalises() && bias.empty() && !restricted && output_index >= min_tokens;
    }
};

struct Draw {
    const Sampling* how = nullptr;
    const uint32_t* history = nullptr;
    int64_t history_tokens = 0, prompt_tokens = 0, output_index = 0;
    double point = 0.0;  // uniform in [0, 1)
};

struct Logprobs {
    bool finite = true;
    double token = 0.0;
    std::vector<std::pair<int32_t, double>> top;  // most likely first
};

enum : int64_t { NOT_FINITE = -1, RULED_OUT = -2 };

struct Drawn {
    int64_t token = NOT_FINITE;
    Logprobs logprobs;
};

class Sampler {
  public:
    Sampler(Team& team, const Kernels& kernels, int64_t vocab) : team_(team), k_(kernels), n_(vocab), scratch_(static_cast<size_t>(team.size())) {}

    Sampler(std::unique_ptr<Team> own, const Kernels& kernels, int64_t vocab) : Sampler(*own, kernels, vocab) { own_ = std::move(own); }

    int64_t vocab() const { return n_; }

    void draw(const float* logits, const std::vector<Draw>& draws, std::vector<Drawn>& out) {
        out.assign(draws.size(), Drawn());
        team_.share(static_cast<int64_t>(draws.size()), [&](int64_t i, int thread) {
            out[static_cast<size_t>(i)] = one(logits + i * n_, draws[static_cast<size_t>(i)], scratch_[static_cast<size_t>(thread)]);
        });
    }

    void logprobs(const float* logits, const std::vector<int32_t>& tokens, int64_t top, std::vector<Logprobs>& out) {
        out.assign(tokens.size(), Logprobs());
        team_.share(static_cast<int64_t>(tokens.size()), [&](int64_t i, int thread) {
            Scratch& s = scratch_[static_cast<size_t>(thread)];
            const float* row = logits + i * n_;
            out[static_cast<size_t>(i)] = logprobs_of(row, look(row, s), tokens[static_cast<size_t>(i)], top, s);
        });
    }

  private:
    static constexpr int64_t BLOCK = 256;      // as in exec/sampler.py: tokens whose weights are summed together in a draw from all
    static constexpr int64_t STRIP = 64;       // tokens whose highest is remembered, so that few of them are looked at again
    static constexpr double NATS = 8.0, DEEPEST = 16 * NATS;
    static constexpr double SMALLEST_TEMPERATURE = 1e-4;
    static constexpr double BELOW_ONE = 1.0 - 0x1p-53;
    static constexpr float LOWEST = -std::numeric_limits<float>::infinity();

    struct Weighed {
        float value;
        double weight;
    };

    struct Scratch {
        std::vector<Weighed> weighed;
        std::vector<float> values, weights, strips;
        std::vector<int32_t> counts, ids;
        std::vector<float> chosen;
        std::vector<double> sums;
    };

    struct Look {
        float highest;
        bool finite;
    };

    // The highest of a row and of each strip of it, and whether all are finite.
    Look look(const float* row, Scratch& s) const {
        s.strips.resize(static_cast<size_t>((n_ + STRIP - 1) / STRIP));
        return look_at(row, n_, s.strips.data());
    }

    static Look look_at(const float* row, int64_t n, float* strips) {
        float highest = LOWEST;
        int bad = 0;
        for (int64_t at = 0; at < n; at += STRIP) {
            float lanes[16];
            std::fill(lanes, lanes + 16, LOWEST);
            const int64_t end = std::min(at + STRIP, n);
            int64_t i = at;
            for (; i + 16 <= end; i += 16)
                for (int j = 0; j < 16; ++j) {
                    const float x = row[i + j];
                    bad |= !(std::fabs(x) <= std::numeric_limits<float>::max());
                    lanes[j] = x > lanes[j] ? x : lanes[j];
                }
            for (; i < end; ++i) {
                bad |= !(std::fabs(row[i]) <= std::numeric_limits<float>::max());
                lanes[0] = row[i] > lanes[0] ? row[i] : lanes[0];
            }
            float most = lanes[0];
            for (int j = 1; j < 16; ++j) most = lanes[j] > most ? lanes[j] : most;
            strips[at / STRIP] = most;
            highest = most > highest ? most : highest;
        }
        return {highest, bad == 0};
    }

    // The first index of a row's highest value, `highest`.
    static int64_t first_of(const float* row, int64_t n, const float* strips, float highest) {
        for (int64_t at = 0; at < n; at += STRIP) {
            if (strips[at / STRIP] != highest) continue;
            for (int64_t i = at; i < std::min(at + STRIP, n); ++i)
                if (row[i] == highest) return i;
        }
        return 0;
    }

    Drawn one(const float* logits, const Draw& draw, Scratch& s) const {
        Drawn drawn;
        const Sampling& how = *draw.how;
        const Look raw = look(logits, s);
        if (!raw.finite) return drawn;
        drawn.token = how.plain_greedy(draw.output_index) ? first_of(logits, n_, s.strips.data(), raw.highest) : choose(logits, draw, raw, s);
        if (how.logprobs >= 0 && drawn.token >= 0) drawn.logprobs = logprobs_of(logits, look(logits, s), drawn.token, how.logprobs, s);
        return drawn;
    }

    // Steps 1 to 10. Uses values, and strips anew when the values are not the row's own.
    int64_t choose(const float* logits, const Draw& draw, Look raw, Scratch& s) const {
        const Sampling& how = *draw.how;
        const bool own = !how.penalises() && how.bias.empty() && !how.restricted && (draw.output_index >= how.min_tokens || how.stop_ids.empty());
        const float* values = logits;
        int64_t n = n_;
        float highest = raw.highest;
        if (!own) {
            adjust(logits, draw, s);
            values = s.values.data();
            n = static_cast<int64_t>(s.values.size());
            s.strips.resize(static_cast<size_t>((n + STRIP - 1) / STRIP));
            const Look adjusted = look_at(values, n, s.strips.data());
            highest = adjusted.highest;
            if (has_nan(values, n)) return NOT_FINITE;
            if (highest == LOWEST) return RULED_OUT;
            if (!(highest <= std::numeric_limits<float>::max())) return NOT_FINITE;
        }
        const int64_t place = how.temperature > 0.0 ? draw_from(values, n, highest, how, draw.point, s) : first_of(values, n, s.strips.data(), highest);
        return how.restricted ? how.allowed_ids[static_cast<size_t>(place)] : place;
    }

    static bool has_nan(const float* values, int64_t n) {
        int found = 0;
        for (int64_t i = 0; i < n; ++i) found |= values[i] != values[i];
        return found != 0;
    }

    // Steps 1 to 5, in the order and precision of exec/sampler.py.
    void adjust(const float* logits, const Draw& draw, Scratch& s) const {
        const Sampling& how = *draw.how;
        s.values.assign(logits, logits + n_);
        float* values = s.values.data();
        for (const auto& [id, bias] : how.bias) values[id] += bias;
        if (how.penalises()) {
            s.counts.resize(static_cast<size_t>(n_), 0);
            int32_t* counts = s.counts.data();
            if (how.repetition_penalty != 1.0) {
                const float penalty = static_cast<float>(how.repetition_penalty);
                for (int64_t i = 0; i < draw.history_tokens; ++i) {
                    const uint32_t t = draw.history[i];
                    if (counts[t]++) continue;
                    values[t] = values[t] > 0 ? values[t] / penalty : values[t] * penalty;
                }
                for (int64_t i = 0; i < draw.history_tokens; ++i) counts[draw.history[i]] = 0;
            }
            if (how.penalises_output()) {
                for (int64_t i = draw.prompt_tokens; i < draw.history_tokens; ++i) ++counts[draw.history[i]];
                for (int64_t i = draw.prompt_tokens; i < draw.history_tokens; ++i) {
                    const uint32_t t = draw.history[i];
                    if (!counts[t]) continue;
                    values[t] -= static_cast<float>(how.frequency_penalty * counts[t] + how.presence_penalty);
                    counts[t] = 0;
                }
            }
        }
        if (draw.output_index < how.min_tokens)
            for (int32_t id : how.stop_ids) values[id] = LOWEST;
        if (how.restricted) {
            // Sorted ids, so that each is read before its place is overwritten.
            for (size_t i = 0; i < how.allowed_ids.size(); ++i) values[i] = values[how.allowed_ids[i]];
            s.values.resize(how.allowed_ids.size());
        }
    }

    // Steps 6 to 10 with a temperature. Values below are scaled: (value - highest) / temperature, 0 at most.
    int64_t draw_from(const float* values, int64_t n, float highest, const Sampling& how, double point, Scratch& s) const {
        const float temperature = static_cast<float>(std::max(how.temperature, SMALLEST_TEMPERATURE));
        const bool by_rank = how.top_k > 0 && how.top_k < n, by_mass = how.top_p < 1.0, by_floor = how.min_p > 0.0;
        if (!by_rank && !by_mass && !by_floor) return draw_from_all(values, n, highest, temperature, point, s);
        const auto scaled = [&](float x) { return (x - highest) / temperature; };
        const auto gather = [&](float floor) {  // every place whose scaled value is at least `floor`, in order
            s.ids.clear();
            for (int64_t at = 0; at < n; at += STRIP) {
                if (!(scaled(s.strips[static_cast<size_t>(at / STRIP)]) >= floor)) continue;
                for (int64_t i = at; i < std::min(at + STRIP, n); ++i)
                    if (scaled(values[i]) >= floor) s.ids.push_back(static_cast<int32_t>(i));
            }
        };
        const auto keep_from = [&](float floor) {  // of ids, and of sums where they stand beside them
            size_t kept = 0;
            for (size_t i = 0; i < s.ids.size(); ++i) {
                if (!(scaled(values[s.ids[i]]) >= floor)) continue;
                s.ids[kept] = s.ids[i];
                if (!s.sums.empty()) s.sums[kept] = s.sums[i];
                ++kept;
            }
            s.ids.resize(kept);
            if (!s.sums.empty()) s.sums.resize(kept);
        };
        const auto weigh_chosen = [&] {
            s.sums.clear();
            for (int32_t i : s.ids) s.sums.push_back(std::exp(static_cast<double>(scaled(values[i]))));
        };
        s.sums.clear();
        if (by_rank) {
            double depth = NATS;
            gather(static_cast<float>(-depth));
            while (static_cast<int64_t>(s.ids.size()) < how.top_k) {
                depth *= 2;
                gather(depth < DEEPEST ? static_cast<float>(-depth) : LOWEST);
            }
            s.chosen.clear();
            for (int32_t i : s.ids) s.chosen.push_back(scaled(values[i]));
            std::nth_element(s.chosen.begin(), s.chosen.begin() + (how.top_k - 1), s.chosen.end(), std::greater<float>());
            keep_from(s.chosen[static_cast<size_t>(how.top_k - 1)]);
        }
        if (by_mass) {
            double total = -1.0;
            if (!by_rank) total = gather_mass(values, n, highest, temperature, how.top_p, gather, s);
            weigh_chosen();
            s.weighed.clear();
            for (size_t i = 0; i < s.ids.size(); ++i) s.weighed.push_back({scaled(values[s.ids[i]]), s.sums[i]});
            if (total < 0.0) total = std::accumulate(s.sums.begin(), s.sums.end(), 0.0);
            keep_from(nucleus_floor(s.weighed, how.top_p * total));
        }
        if (by_floor) {
            const float floor = static_cast<float>(std::log(how.min_p));
            if (by_rank || by_mass) keep_from(floor);
            else gather(floor);
        }
        if (!by_mass) weigh_chosen();
        return s.ids[static_cast<size_t>(place_of(s.sums, point))];
    }

    // Leaves in ids all values above some floor that hold at least `share` of the whole weight; returns the whole weight.
    template <class Gather>
    double gather_mass(const float* values, int64_t n, float highest, float temperature, double share, const Gather& gather, Scratch& s) const {
        weigh(values, n, highest, temperature, s);
        double total = 0.0;
        for (double sum : s.sums) total += sum;
        for (double depth = NATS; depth < DEEPEST; depth *= 2) {
            gather(static_cast<float>(-depth));
            double mass = 0.0;
            for (int32_t i : s.ids) mass += static_cast<double>(s.weights[static_cast<size_t>(i)]);
            if (mass >= share * total) return total;
        }
        gather(LOWEST);
        return total;
    }

    // The lowest value among the fewest highest ones that hold `target` together: parts are split by a pivot until it is found, so nothing
    // is sorted but the last few.
    static float nucleus_floor(std::vector<Weighed>& all, double target) {
        auto low = all.begin(), high = all.end();
        double above = 0.0;  // of all that are higher than [low, high)
        const auto sum = [](auto from, auto to) { return std::accumulate(from, to, 0.0, [](double s, const Weighed& w) { return s + w.weight; }); };
        while (high - low > 32) {
            const float a = low->value, b = (low + (high - low) / 2)->value, c = (high - 1)->value;
            const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
            const auto equal = std::partition(low, high, [pivot](const Weighed& w) { return w.value > pivot; });
            const auto lower = std::partition(equal, high, [pivot](const Weighed& w) { return w.value == pivot; });
            const double higher_weight = sum(low, equal), equal_weight = sum(equal, lower);
            if (above + higher_weight >= target) {
                high = equal;
            } else if (above + higher_weight + equal_weight >= target) {
                return pivot;
            } else {
                above += higher_weight + equal_weight;
                low = lower;
            }
        }
        std::sort(low, high, [](const Weighed& a, const Weighed& b) { return a.value > b.value; });
        for (; low != high; ++low)
            if ((above += low->weight) >= target) return low->value;
        return high == all.end() || all.empty() ? LOWEST : (high - 1)->value;
    }

    int64_t draw_from_all(const float* values, int64_t n, float highest, float temperature, double point, Scratch& s) const {
        weigh(values, n, highest, temperature, s);
        const std::vector<double> blocks = s.sums;
        const int64_t block = place_of(s.sums, point);
        double before = 0.0, total = 0.0;
        for (size_t i = 0; i < blocks.size(); ++i) {
            if (static_cast<int64_t>(i) < block) before += blocks[i];
            total += blocks[i];
        }
        const double share = (point * total - before) / blocks[static_cast<size_t>(block)];
        const int64_t first = block * BLOCK;
        s.sums.assign(s.weights.begin() + first, s.weights.begin() + std::min(first + BLOCK, n));
        return first + place_of(s.sums, std::min(std::max(share, 0.0), BELOW_ONE));
    }

    // weights = e^scaled, sums = their sums by block.
    void weigh(const float* values, int64_t n, float highest, float temperature, Scratch& s) const {
        s.weights.resize(static_cast<size_t>(n));
        float* weights = s.weights.data();
        for (int64_t i = 0; i < n; ++i) weights[i] = (values[i] - highest) / temperature;
        k_.exponential(weights, static_cast<int>(n), weights);
        s.sums.clear();
        for (int64_t at = 0; at < n; at += BLOCK) s.sums.push_back(sum_of(weights + at, std::min(BLOCK, n - at)));
    }

    static double sum_of(const float* x, int64_t n) {
        double lanes[8] = {};
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            for (int j = 0; j < 8; ++j) lanes[j] += static_cast<double>(x[i + j]);
        for (; i < n; ++i) lanes[0] += static_cast<double>(x[i]);
        return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }

    // The first index at which the cumulative weight passes `point` of the whole; never one of weight 0. Makes weights cumulative.
    static int64_t place_of(std::vector<double>& weights, double point) {
        double sum = 0.0;
        for (double& w : weights) w = sum += w;
        const auto place = std::upper_bound(weights.begin(), weights.end(), point * sum);
        return std::min(place, std::lower_bound(weights.begin(), weights.end(), sum)) - weights.begin();
    }

    Logprobs logprobs_of(const float* logits, Look raw, int64_t token, int64_t top, Scratch& s) const {
        Logprobs out;
        out.finite = raw.finite;
        if (!raw.finite) return out;
        weigh(logits, n_, raw.highest, 1.0f, s);
        double total = 0.0;
        for (double sum : s.sums) total += sum;
        const double log_total = static_cast<double>(raw.highest) + std::log(total);
        out.token = static_cast<double>(logits[token]) - log_total;
        for (int32_t id : highest_ids(logits, std::min(top, n_), s)) out.top.emplace_back(id, static_cast<double>(logits[id]) - log_total);
        return out;
    }

    // Ids of the `count` highest, highest first, the lower id first among equals.
    std::vector<int32_t> highest_ids(const float* row, int64_t count, const Scratch& s) const {
        std::vector<int32_t> heap;  // the least of the chosen on top
        if (count <= 0) return heap;
        const auto better = [row](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); };
        for (int64_t at = 0; at < n_; at += STRIP) {
            if (static_cast<int64_t>(heap.size()) == count && !(s.strips[static_cast<size_t>(at / STRIP)] > row[heap.front()])) continue;
            for (int32_t i = static_cast<int32_t>(at); i < std::min(at + STRIP, n_); ++i) {
                if (static_cast<int64_t>(heap.size()) == count) {
                    if (!better(i, heap.front())) continue;
                    std::pop_heap(heap.begin(), heap.end(), better);
                    heap.pop_back();
                }
                heap.push_back(i);
                std::push_heap(heap.begin(), heap.end(), better);
            }
        }
        std::sort_heap(heap.begin(), heap.end(), better);
        return heap;
    }

    std::unique_ptr<Team> own_;  // null on a decoder's
    Team& team_;
    const Kernels& k_;
    int64_t n_;
    std::vector<Scratch> scratch_;
};

}  // namespace kvseal
