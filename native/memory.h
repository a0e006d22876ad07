// Large anonymous memory: lazily zero, huge pages asked for, never touched in advance.
//
// Owns one mapping. A pool costs resident memory only where it has been written.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace kvseal {

class Mapping {
  public:
    explicit Mapping(int64_t bytes) : bytes_(bytes) {
        void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(at);
#if defined(MADV_HUGEPAGE)
        madvise(at, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
    }
    ~Mapping() { munmap(data_, static_cast<size_t>(bytes_)); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }

  private:
    uint8_t* data_ = nullptr;
    int64_t bytes_;
};

}  // namespace kvseal
