// A persistent team of threads and the one way in which they share work.
//
// Owns the threads and the claiming of units. Never decides how big a unit is: callers divide work by rows, heads and fixed
// ranges, so that results cannot depend on how many threads there are or which of them was faster (L13).
// A waiting thread spins for a short bounded time, then sleeps; between calls nothing spins.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvseal {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    // Called by a worker while it waits for work, with 0, 1, 2, ...: does a few nanoseconds of something useful or returns false.
    using Idle = std::function<bool(int thread, int turn)>;

    explicit Team(int threads, Idle idle = {}) : size_(threads < 1 ? 1 : threads), idle_(std::move(idle)), ranges_(static_cast<size_t>(size_)) {
        for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
        stay_on_cores();
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_.store(true);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // body(unit, thread) for every unit 0 .. units - 1, each once; returns when all are done. Each thread begins with a run of consecutive
    // units of its own, so that it reads memory in one stream, and then takes what others have left. The caller works too and waits for
    // units that others have begun, never for threads that have not come: a busy neighbour slows a step, it does not stop it.
    // Called by one thread only. Bodies must not throw.
    template <class Body>
    void share(int64_t units, Body&& body) {
        if (size_ == 1 || units <= 1) {
            for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
            return;
        }
        context_ = const_cast<void*>(static_cast<const void*>(&body));
        using Plain = std::remove_reference_t<Body>;
        call_ = [](void* context, int64_t unit, int thread) { (*static_cast<Plain*>(context))(unit, thread); };
        done_.store(0, std::memory_order_relaxed);
        for (int i = size_; i-- > 0;) {
            const uint64_t begin = static_cast<uint64_t>(units * i / size_), end = static_cast<uint64_t>(units * (i + 1) / size_);
            ranges_[static_cast<size_t>(i)].ticket.store(end << UNIT_BITS | begin);
        }
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        const int64_t mine = claim_all(0);
        if (done_.fetch_add(mine) + mine == units) return;
        wait_until(finished_, waiting_, [&] { return done_.load() == units; }, [](int) { return false; });
    }

  private:
    static constexpr int SPINS = 2000;  // some tens of microseconds
    static constexpr int UNIT_BITS = 32;
    static constexpr uint64_t UNIT_MASK = (1ULL << UNIT_BITS) - 1;

    // The end of a thread's units and the next one: whoever gets a unit below the end may use context_ until it counts as done.
    struct alignas(64) Range {
        std::atomic<uint64_t> ticket{0};
    };
    static bool has_units(uint64_t ticket) { return (ticket & UNIT_MASK) < ticket >> UNIT_BITS; }
    bool any_units() const {
        for (const Range& range : ranges_)
            if (has_units(range.ticket.load(std::memory_order_relaxed))) return true;
        return false;
    }

    int64_t claim_all(int thread) {
        int64_t mine = 0;
        for (int i = 0; i < size_; ++i) {
            std::atomic<uint64_t>& range = ranges_[static_cast<size_t>((thread + i) % size_)].ticket;
            while (has_units(range.load(std::memory_order_relaxed))) {
                const uint64_t ticket = range.fetch_add(1, std::memory_order_acquire);
                if (!has_units(ticket)) break;
                call_(context_, static_cast<int64_t>(ticket & UNIT_MASK), thread);
                ++mine;
            }
        }
        return mine;
    }

    template <class Condition, class Meanwhile>
    void wait_until(std::condition_variable& signal, std::atomic<int>& waiters, Condition&& condition, Meanwhile&& meanwhile) {
        for (int i = 0; i < SPINS; ++i) {
            if (condition()) return;
            if (!meanwhile(i)) relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        waiters.fetch_add(1);
        while (!condition()) signal.wait(lock);
        waiters.fetch_sub(1);
    }

    void work(int thread) {
        for (;;) {
            wait_until(wake_, sleepers_, [this] { return stop_.load() || any_units(); }, [&](int turn) { return idle_ && idle_(thread, turn); });
            if (stop_.load()) return;
            const int64_t mine = claim_all(thread);
            if (mine == 0) continue;
            done_.fetch_add(mine);
            if (waiting_.load() > 0) {
                std::lock_guard<std::mutex> lock(mutex_);
                finished_.notify_all();
            }
        }
    }

    // One thread per core of those that the process may use: each stays on its core, and what it reads stays in that core's cache. With
    // fewer threads than cores the scheduler knows better which cores are free.
    void stay_on_cores() {
#if defined(__linux__)
        cpu_set_t allowed;
        CPU_ZERO(&allowed);
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) != size_) return;
        int core = -1;
        for (int i = 0; i < size_; ++i) {
            do ++core;
            while (!CPU_ISSET(core, &allowed));
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(core, &one);
            if (i > 0) pthread_setaffinity_np(workers_[static_cast<size_t>(i - 1)].native_handle(), sizeof one, &one);
        }
#endif
    }

    const int size_;
    const Idle idle_;
    std::vector<Range> ranges_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0}, waiting_{0};
    void* context_ = nullptr;
    void (*call_)(void*, int64_t, int) = nullptr;
    alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace kvseal
