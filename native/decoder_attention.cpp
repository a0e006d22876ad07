// The attention part of a step: who reads what, in which units.
#include <algorithm>

#include "decoder.h"

namespace kvseal {
namespace {

constexpr int ROWS_PER_THREAD = 4;
constexpr int PARTIAL_HEADER = AttendScratch::HEADER;
constexpr int64_t COMPANY_FLOATS = 16 << 20;  // partials of shared partitions, at most

}  // namespace

void Decoder::plan_attention() {
    attend_units_.clear();
    company_.clear();
    const int group = m_.heads / m_.kv_heads, block = attend_block_tokens(group);
    // Where there are rows enough for all threads, a decoding row reads its pages once for all heads.
    const int side_by_side = static_cast<int>(rows_.size()) >= ROWS_PER_THREAD * team_.size() ? attend_side_by_side(m_.kv_heads, group) : 1;
    int64_t partial = 0;
    for (size_t r = rows_.size(); r-- > 0;) {
        const Row& row = rows_[r];
        if (row.count == 0) continue;
        const int last = row.start + row.count - 1;
        // Few queries over a long past: one unit per partition, so that several threads can work on one row. Same sums either way.
        if (tokens_ <= FEW_TOKENS && last >= PARTITION_TOKENS) {
            for (int t = 0; t < row.count; ++t)
                for (int head = 0; head < m_.kv_heads; ++head)
                    for (int p = 0; p <= (row.start + t) / PARTITION_TOKENS; ++p) {
                        attend_units_.push_back({static_cast<int>(r), head, 1, t, 1, p, partial});
                        partial += static_cast<int64_t>(group) * (m_.head_dim + PARTIAL_HEADER);
                    }
            continue;
        }
        const int heads = row.count == 1 ? side_by_side : 1;
        for (int t = (row.count - 1) / block * block; t >= 0; t -= block)  // the longest first
            for (int head = 0; head < m_.kv_heads; head += heads)
                attend_units_.push_back({static_cast<int>(r), head, std::min(heads, m_.kv_heads - head), t, std::min(block, row.count - t), -1, 0});
    }
    if (tokens_ > FEW_TOKENS) {
        company_.plan(rows_, kv_, group, block, COMPANY_FLOATS);
        partial = company_.floats();
    }
    if (partials_.size() < static_cast<size_t>(partial)) partials_.resize(static_cast<size_t>(partial));
}

void Decoder::attend(int layer) {
    if (!windowed(layer))
        team_.share(static_cast<int64_t>(company_.units().size()),
                    [&](int64_t unit, int thread) { attend_company(layer, thread, company_.units()[static_cast<size_t>(unit)]); });
    team_.share(static_cast<int64_t>(attend_units_.size()),
                [&](int64_t unit, int thread) { attend_unit(layer, thread, attend_units_[static_cast<size_t>(unit)]); });
}

AttendWork Decoder::attend_work(int layer, int thread, int row, int kv_head) {
    AttendWork work;
    work.kv = &kv_;
    work.row = &rows_[static_cast<size_t>(row)];
    work.layer = layer;
    work.kv_head = kv_head;
    work.group = m_.heads / m_.kv_heads;
    work.window = m_.windows.empty() ? 0 : m_.windows[static_cast<size_t>(layer)];
    work.scale = m_.attention_scale;
    work.q = q_.data() + static_cast<int64_t>(kv_head) * work.group * m_.head_dim;
    work.q_stride = static_cast<int64_t>(m_.heads) * m_.head_dim;
    work.scratch = scratch_[static_cast<size_t>(thread)].data();
    return work;
}

void Decoder::attend_unit(int layer, int thread, const AttendUnit& unit) {
    const bool in_company = !windowed(layer) && company_.partitions(unit.row) > 0;
    if (guard_.dead(unit.row) || (in_company && guard_.reported(unit.row))) return;
    AttendWork work = attend_work(layer, thread, unit.row, unit.kv_head);
    const int64_t token = work.row->first_token + unit.token;
    work.first_position = work.row->start + unit.token;
    work.tokens = unit.tokens;
    work.heads = unit.heads;
    work.q += token * work.q_stride;
    if (in_company) {
        work.before = partials_.data() + company_.partials(unit.row, unit.kv_head);
        work.before_partitions = company_.partitions(unit.row);
    }
    float* out = attended_.values.data() + token * attended_.width + static_cast<int64_t>(unit.kv_head) * work.group * m_.head_dim;
    const uint64_t key = unit.partition < 0 ? k_.attend(work, out, attended_.width)
                                            : k_.attend_partition(work, unit.partition, partials_.data() + unit.partial);
    if (key != UNBROKEN) guard_.report(unit.row, key);
}

void Decoder::attend_company(int layer, int thread, const Company::Unit& unit) {
    const int* members = company_.members(unit);
    int32_t places[ATTEND_QUERIES];
    float* out[ATTEND_QUERIES];
    AttendWork work = attend_work(layer, thread, members[0], unit.kv_head);
    for (int i = 0; i < unit.count; ++i) {
        places[i] = rows_[static_cast<size_t>(members[i])].first_token;
        out[i] = partials_.data() + company_.partials(members[i], unit.kv_head) + unit.partition * company_.partition_floats();
    }
    work.tokens = unit.count;
    work.first_position = (unit.partition + 1) * PARTITION_TOKENS - 1;  // from there on, a query sees all of the partition
    work.places = places;
    const uint64_t key = k_.attend_shared(work, unit.partition, out);
    for (int i = 0; key != UNBROKEN && i < unit.count; ++i) guard_.report(members[i], key);
}

void Decoder::finish_attention(int token) {
    const int r = row_of_[static_cast<size_t>(token)], group = m_.heads / m_.kv_heads;
    const Row& row = rows_[static_cast<size_t>(r)];
    float* out = attended_.values.data() + static_cast<int64_t>(token) * attended_.width;
    if (guard_.reported(r)) {
        std::fill(out, out + attended_.width, 0.0f);
    } else {
        for (size_t u = 0; tokens_ <= FEW_TOKENS && u < attend_units_.size(); ++u) {
            const AttendUnit& unit = attend_units_[u];
            if (unit.row != r || unit.partition != 0 || row.first_token + unit.token != token) continue;
            k_.attend_combine(partials_.data() + unit.partial, position_of_[static_cast<size_t>(token)] / PARTITION_TOKENS + 1, group,
                              kv_.kind, m_.head_dim, out + static_cast<int64_t>(unit.kv_head) * group * m_.head_dim);
        }
    }
    round(token, attended_);
}

}  // namespace kvseal
