// Large memory: lazily zero, huge pages asked for, never touched in advance.
//
// Owns one mapping. A pool costs resident memory only where it has been written. A shared one is a file without a name (memfd), sealed
// against any change of size, so that a process that maps it can never be struck by a truncation.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#include <fcntl.h>
#endif

#include <cstdint>
#include <new>
#include <stdexcept>

namespace kvseal {

class Mapping {
  public:
    explicit Mapping(int64_t bytes, bool shared = false) : bytes_(bytes) {
        if (shared) file_ = open_shared(bytes);
        const int flags = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
        void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, file_, 0);
        if (at == MAP_FAILED) {
            if (file_ >= 0) close(file_);
            throw std::bad_alloc();
        }
        data_ = static_cast<uint8_t*>(at);
#if defined(MADV_HUGEPAGE)
        madvise(at, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
    }
    ~Mapping() {
        munmap(data_, static_cast<size_t>(bytes_));
        if (file_ >= 0) close(file_);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    int file() const { return file_; }  // -1 when private

  private:
    static int open_shared(int64_t bytes) {
#if defined(__linux__)
        const int file = memfd_create("kvseal-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (file < 0) throw std::bad_alloc();
        if (ftruncate(file, bytes) != 0 || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
            close(file);
            throw std::bad_alloc();
        }
        return file;
#else
        (void)bytes;
        throw std::invalid_argument("shared arenas need Linux");
#endif
    }

    uint8_t* data_ = nullptr;
    int64_t bytes_;
    int file_ = -1;
};

}  // namespace kvseal
