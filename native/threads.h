// A persistent team of threads and the one way in which they share work.
//
// Owns the threads and the claiming of units. Never decides how big a unit is: callers divide work by rows, heads and fixed
// ranges, so that results cannot depend on how many threads there are or which of them was faster (L13).
// A waiting thread spins for a short bounded time, then sleeps; between calls nothing spins.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>
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
    explicit Team(int threads) : size_(threads < 1 ? 1 : threads) {
        for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
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

    // body(unit, thread) for every unit 0 .. units - 1, each once, by whoever is free; returns when all are done. The caller works too and
    // waits for units that others have begun, never for threads that have not come: a busy neighbour slows a step, it does not stop it.
    // Called by one thread only. Bodies must not throw.
    template <class Body>
    void share(int64_t units, Body&& body) {
        if (size_ == 1 || units == 1) {
            for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
            return;
        }
        for (int64_t first = 0; first < units; first += MOST_UNITS) {
            auto from = [&](int64_t unit, int thread) { body(first + unit, thread); };
            share_some(units - first < MOST_UNITS ? units - first : MOST_UNITS, from);
        }
    }

  private:
    static constexpr int SPINS = 2000;               // some tens of microseconds
    static constexpr int UNIT_BITS = 24;
    static constexpr int64_t MOST_UNITS = 1 << 20;   // leaves room for claims past the end
    static constexpr uint64_t UNIT_MASK = (1ULL << UNIT_BITS) - 1;

    template <class Body>
    void share_some(int64_t units, Body& body) {
        context_ = &body;
        call_ = [](void* context, int64_t unit, int thread) { (*static_cast<Body*>(context))(unit, thread); };
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(static_cast<uint64_t>(units) << UNIT_BITS);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        const int64_t mine = claim_all(0);
        if (done_.fetch_add(mine) + mine == units) return;
        wait_until(finished_, waiting_, [&] { return done_.load() == units; });
    }

    static bool has_units(uint64_t ticket) { return (ticket & UNIT_MASK) < ticket >> UNIT_BITS; }

    // A ticket holds the number of units and the next one: whoever gets a unit below the number may use context_ until it counts as done.
    int64_t claim_all(int thread) {
        int64_t mine = 0;
        while (has_units(ticket_.load(std::memory_order_relaxed))) {
            const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acquire);
            if (!has_units(ticket)) break;
            call_(context_, static_cast<int64_t>(ticket & UNIT_MASK), thread);
            ++mine;
        }
        return mine;
    }

    template <class Condition>
    void wait_until(std::condition_variable& signal, std::atomic<int>& waiters, Condition&& condition) {
        for (int i = 0; i < SPINS; ++i) {
            if (condition()) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        waiters.fetch_add(1);
        while (!condition()) signal.wait(lock);
        waiters.fetch_sub(1);
    }

    void work(int thread) {
        for (;;) {
            wait_until(wake_, sleepers_, [this] { return stop_.load() || has_units(ticket_.load()); });
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

    const int size_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0}, waiting_{0};
    void* context_ = nullptr;
    void (*call_)(void*, int64_t, int) = nullptr;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace kvseal
