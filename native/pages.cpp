#include "pages.h"

#include <algorithm>

namespace kvseal {

PageGuard::PageGuard(const KVLayout& kv) : kv_(kv), claims_(static_cast<size_t>(kv.pages), 0) {}

void PageGuard::begin(const std::vector<Row>& rows, const uint64_t* ledger_nonces) {
    rows_ = &rows;
    ledger_nonces_ = ledger_nonces;
    dead_.assign(rows.size(), 0);
    if (reports_.size() < rows.size()) reports_ = std::vector<std::atomic<uint64_t>>(rows.size());
    for (std::atomic<uint64_t>& key : reports_) key.store(UNBROKEN, std::memory_order_relaxed);
    breaks_.clear();
}

void PageGuard::flag(size_t row, uint64_t key, int layer) {
    const Row& r = (*rows_)[row];
    const int64_t ordinal = break_ordinal(key);
    dead_[row] = 1;
    reports_[row].store(key, std::memory_order_relaxed);
    breaks_.push_back({static_cast<int>(row), break_check(key), ordinal < r.table_pages ? static_cast<int64_t>(r.page(ordinal)) : -1, ordinal, layer});
}

uint64_t PageGuard::check_row(const Row& row, int layer) {
    const int first = row.start / kv_.page_tokens, last = (row.start + row.count - 1) / kv_.page_tokens;
    for (int ordinal = first; ordinal <= last; ++ordinal) {
        SealCheck check = TABLE;
        if (row.has(kv_, ordinal)) {
            const int slot = ordinal == first ? row.start % kv_.page_tokens : 0;
            const uint64_t page = row.page(ordinal);
            check = check_write(kv_.seal(static_cast<int64_t>(page), layer), row.expected(kv_, ordinal, layer), slot, ledger_nonces_[page]);
            // Somebody in this step will already write it: what this row would meet if it came afterwards.
            if (check == CLEAN && claims_[page] == claim_) check = slot == 0 ? REUSED : FILLED;
            if (check == CLEAN) claims_[page] = claim_;
        }
        if (check == CLEAN) continue;
        for (int claimed = first; claimed < ordinal; ++claimed) claims_[row.page(claimed)] = 0;
        return break_key(ordinal, check);
    }
    return UNBROKEN;
}

void PageGuard::check_append(int layer) {
    ++claim_;
    for (size_t r = 0; r < rows_->size(); ++r) {
        if (dead_[r] != 0) continue;
        const uint64_t key = check_row((*rows_)[r], layer);
        if (key != UNBROKEN) flag(r, key, layer);
    }
}

void PageGuard::advance(int layer) {
    for (size_t r = 0; r < rows_->size(); ++r) {
        const Row& row = (*rows_)[r];
        if (dead_[r] != 0) continue;
        const int end = row.start + row.count;
        for (int position = row.start; position < end;) {
            const int ordinal = position / kv_.page_tokens, slot = position % kv_.page_tokens;
            const int filled = std::min(kv_.page_tokens, slot + end - position);
            kvseal::advance(kv_.seal(static_cast<int64_t>(row.page(ordinal)), layer), row.expected(kv_, ordinal, layer), slot, filled);
            position += filled - slot;
        }
    }
}

void PageGuard::report(int row, uint64_t key) {
    std::atomic<uint64_t>& lowest = reports_[static_cast<size_t>(row)];
    uint64_t known = lowest.load(std::memory_order_relaxed);
    while (key < known && !lowest.compare_exchange_weak(known, key, std::memory_order_relaxed)) {
    }
}

void PageGuard::collect(int layer) {
    for (size_t r = 0; r < rows_->size(); ++r) {
        const uint64_t key = reports_[r].load(std::memory_order_relaxed);
        if (dead_[r] == 0 && key != UNBROKEN) flag(r, key, layer);
    }
}

}  // namespace kvseal
