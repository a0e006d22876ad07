// The pages of one step: which rows may write, which have broken a seal, and when `filled` moves.
//
// Owns the order check, write, advance (L5), the rule that a page is written by one row of a step, and the first break of each row (L12).
// Never touches payload.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "layout.h"

namespace kvseal {

struct Break {
    int row;
    SealCheck check;
    int64_t page, ordinal;  // page -1: the table has no page there
    int layer;
};

class PageGuard {
  public:
    explicit PageGuard(const KVLayout& kv);

    // `rows` and `ledger_nonces` ([pages]) stay in place until the next `begin`.
    void begin(const std::vector<Row>& rows, const uint64_t* ledger_nonces);
    // All pages that each row will write in this layer, before any is written. One thread.
    void check_append(int layer);
    // After K and V of the step are in place. One thread.
    void advance(int layer);
    // A read that did not match, from any thread; the lowest of a layer counts.
    void report(int row, uint64_t key);
    // Reports become breaks. One thread.
    void collect(int layer);

    bool dead(int row) const { return dead_[static_cast<size_t>(row)] != 0; }
    bool reported(int row) const { return reports_[static_cast<size_t>(row)].load(std::memory_order_relaxed) != UNBROKEN; }
    std::vector<Break> take() { return std::move(breaks_); }

  private:
    uint64_t check_row(const Row& row, int layer);
    void flag(size_t row, uint64_t key, int layer);

    KVLayout kv_;
    const std::vector<Row>* rows_ = nullptr;
    const uint64_t* ledger_nonces_ = nullptr;
    std::vector<uint8_t> dead_;
    std::vector<std::atomic<uint64_t>> reports_;
    std::vector<Break> breaks_;
    std::vector<uint64_t> claims_;  // [pages]; the check that claimed the page last
    uint64_t claim_ = 0;
};

}  // namespace kvseal
