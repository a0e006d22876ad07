// Which decoding rows of a step read the same pages, so that a partition is read once for all of them.
//
// Owns the search: rows of one scope whose tables begin with the same stamps. Never touches a page: the kernel checks the seals that it
// reads against the stamps, and these are equal for all who share them (L3, L4). A row's sums stay the same to the bit (L13): the shared
// partitions give partials, one per query, which the row combines in order before it goes on with its own.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace kvseal {

class Company {
  public:
    // Rows members(unit)[0 .. count) read `partition` together, for one KV head.
    struct Unit {
        int first, count, partition, kv_head;
    };

    void clear() { units_.clear(), order_.clear(), shared_.clear(); }

    // `most_rows` of a unit, `most_floats` of all partials together.
    void plan(const std::vector<Row>& rows, const KVLayout& kv, int group, int most_rows, int64_t most_floats) {
        clear();
        shared_.assign(rows.size(), 0);
        offsets_.assign(rows.size(), 0);
        partition_floats_ = static_cast<int64_t>(group) * (kv.head_dim + AttendScratch::HEADER);
        const int64_t stamps = PARTITION_TOKENS / kv.page_tokens;  // of a partition
        for (size_t r = 0; r < rows.size(); ++r)
            if (rows[r].count == 1 && whole_partitions(rows[r], stamps) > 0) order_.push_back(static_cast<int>(r));
        if (order_.size() < 2) return;
        // Tables in lexical order: whoever shares a beginning stands side by side.
        std::sort(order_.begin(), order_.end(), [&](int a, int b) { return before(rows[static_cast<size_t>(a)], rows[static_cast<size_t>(b)], stamps); });
        const int64_t row_floats = kv.kv_heads * partition_floats_ * static_cast<int64_t>(order_.size());
        const int most_partitions = static_cast<int>(most_floats / row_floats);
        int deepest = 0;
        common_.assign(order_.size(), 0);  // with the next
        for (size_t i = 0; i + 1 < order_.size(); ++i) {
            common_[i] = std::min(most_partitions, common(row_at(rows, i), row_at(rows, i + 1), stamps));
            deepest = std::max(deepest, common_[i]);
            for (size_t j = i; j <= i + 1; ++j) shared_[static_cast<size_t>(order_[j])] = std::max(shared_[static_cast<size_t>(order_[j])], common_[i]);
        }
        floats_ = 0;
        for (const int r : order_) {
            offsets_[static_cast<size_t>(r)] = floats_;
            floats_ += shared_[static_cast<size_t>(r)] * kv.kv_heads * partition_floats_;
        }
        for (int p = 0; p < deepest; ++p)
            for (size_t i = 0, end; i + 1 < order_.size(); i = end + 1) {
                for (end = i; common_[end] > p; ++end) {}
                for (size_t first = i; end > i && first <= end; first += static_cast<size_t>(most_rows))
                    for (int head = 0; head < kv.kv_heads; ++head)
                        units_.push_back({static_cast<int>(first), static_cast<int>(std::min(end + 1 - first, static_cast<size_t>(most_rows))), p, head});
            }
    }

    const std::vector<Unit>& units() const { return units_; }
    const int* members(const Unit& unit) const { return order_.data() + unit.first; }
    int64_t floats() const { return units_.empty() ? 0 : floats_; }
    // The first so many partitions of the row are computed in company.
    int partitions(int row) const { return units_.empty() ? 0 : shared_[static_cast<size_t>(row)]; }
    // Where their partials lie: [partition][query head of the group].
    int64_t partials(int row, int kv_head) const {
        return offsets_[static_cast<size_t>(row)] + static_cast<int64_t>(kv_head) * shared_[static_cast<size_t>(row)] * partition_floats_;
    }
    int64_t partition_floats() const { return partition_floats_; }

  private:
    static int whole_partitions(const Row& row, int64_t stamps) {
        return static_cast<int>(std::min<int64_t>((row.start + 1) / PARTITION_TOKENS, row.table_pages / stamps));
    }
    static bool before(const Row& a, const Row& b, int64_t stamps) {
        const int scope = std::memcmp(a.scope, b.scope, sizeof a.scope);
        if (scope != 0) return scope < 0;
        const int na = whole_partitions(a, stamps), nb = whole_partitions(b, stamps);
        const int order = std::memcmp(a.stamps, b.stamps, static_cast<size_t>(std::min(na, nb) * stamps) * 2 * sizeof(uint64_t));
        return order != 0 ? order < 0 : na < nb;
    }
    static int common(const Row& a, const Row& b, int64_t stamps) {
        if (std::memcmp(a.scope, b.scope, sizeof a.scope) != 0) return 0;
        const int most = std::min(whole_partitions(a, stamps), whole_partitions(b, stamps));
        const size_t words = static_cast<size_t>(stamps) * 2;
        int n = 0;
        while (n < most && std::memcmp(a.stamps + static_cast<size_t>(n) * words, b.stamps + static_cast<size_t>(n) * words, words * sizeof(uint64_t)) == 0) ++n;
        return n;
    }
    const Row& row_at(const std::vector<Row>& rows, size_t i) const { return rows[static_cast<size_t>(order_[i])]; }

    std::vector<Unit> units_;
    std::vector<int> order_, common_, shared_;
    std::vector<int64_t> offsets_;
    int64_t partition_floats_ = 0, floats_ = 0;
};

}  // namespace kvseal
