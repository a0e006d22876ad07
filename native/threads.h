// A persistent team of threads and the one way in which they share work.
//
// Owns the threads, the claiming of units and the barrier. Never decides how big a unit is: callers divide work by rows, heads and fixed
// ranges, so that results cannot depend on how many threads there are or which of them was faster (L13).
// A waiting thread spins for a short bounded time, then sleeps; between calls nothing spins.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
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
        post(nullptr);
        for (std::thread& worker : workers_) worker.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs body(thread) on every thread of the team and returns when all have returned. Bodies must not throw.
    void run(const std::function<void(int)>& body) {
        if (size_ == 1) return body(0);
        post(&body);
        body(0);
        barrier([] {});
    }

    // Inside `run`, called by every thread in the same order: body(unit) for 0 .. units - 1, each once, by whoever is free; then `after`
    // once, by the last to arrive; then all go on.
    template <class Body, class After>
    void share(int64_t units, int /*thread*/, Body&& body, After&& after) {
        if (size_ == 1) {
            for (int64_t unit = 0; unit < units; ++unit) body(unit);
            after();
            return;
        }
        for (int64_t unit = next_.fetch_add(1, std::memory_order_relaxed); unit < units; unit = next_.fetch_add(1, std::memory_order_relaxed))
            body(unit);
        barrier([&] {
            next_.store(0, std::memory_order_relaxed);
            after();
        });
    }

  private:
    static constexpr int SPINS = 2000;  // some tens of microseconds

    template <class After>
    void barrier(After&& after) {
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            after();
            round_.store(round + 1);
            if (sleepers_.load() > 0) {
                std::lock_guard<std::mutex> lock(mutex_);
                wake_.notify_all();
            }
            return;
        }
        wait_while([&] { return round_.load() == round; });
    }

    template <class Condition>
    void wait_while(Condition&& condition) {
        for (int i = 0; i < SPINS; ++i) {
            if (!condition()) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        while (condition()) wake_.wait(lock);
        sleepers_.fetch_sub(1);
    }

    void post(const std::function<void(int)>* body) {
        std::lock_guard<std::mutex> lock(mutex_);
        body_ = body;
        job_.fetch_add(1);
        wake_.notify_all();
    }

    void work(int thread) {
        uint32_t seen = 0;
        for (;;) {
            wait_while([&] { return job_.load() == seen; });
            ++seen;
            if (body_ == nullptr) return;
            (*body_)(thread);
            barrier([] {});
        }
    }

    const int size_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<uint32_t> job_{0};
    std::atomic<int> sleepers_{0};
};

}  // namespace kvseal
