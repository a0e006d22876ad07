// The memory of packed weights: anonymous and filled here, or a file that was filled before and is shared with whoever maps it.
//
// Owns the order of matrices in a slab: one after the other, as they are placed. A mapped slab is read-only; what stands in it is checked
// by whoever mapped it (kvseal/exec/weights/packed_cache.py), never here.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>

#include "digest.h"
#include "memory.h"
#include "pack.h"

namespace kvseal {

// A file's bytes from 0 on, read-only. Asks for huge pages, which file systems with large folios give.
class FileMapping {
  public:
    FileMapping(int file, int64_t bytes) : bytes_(bytes) {
        void* at = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<const uint8_t*>(at);
#if defined(MADV_HUGEPAGE)
        madvise(at, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
#if defined(MADV_POPULATE_READ)
        madvise(at, static_cast<size_t>(bytes), MADV_POPULATE_READ);  // One call instead of a fault for every few pages.
#endif
    }
    ~FileMapping() { munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_)); }
    FileMapping(const FileMapping&) = delete;
    FileMapping& operator=(const FileMapping&) = delete;

    const uint8_t* data() const { return data_; }

  private:
    const uint8_t* data_ = nullptr;
    int64_t bytes_;
};

struct Packed {
    Linear linear;
    int64_t bytes = 0;
    std::shared_ptr<const void> owner;  // of the memory
    uint8_t* writable = nullptr;        // null when mapped
};

class WeightSlab {
  public:
    explicit WeightSlab(int64_t bytes) : bytes_((bytes + 63) / 64 * 64) {
        if (bytes <= 0) throw std::invalid_argument("a slab needs room");
        auto mapping = std::make_shared<Mapping>(bytes_);
        data_ = writable_ = mapping->data();
        owner_ = mapping;
    }
    // `bytes` of the file from `offset` on, which is a multiple of 64.
    WeightSlab(int file, int64_t offset, int64_t bytes) : bytes_(bytes) {
        if (offset < 0 || offset % 64 != 0 || bytes <= 0 || bytes % 64 != 0) throw std::invalid_argument("a slab is whole lines of 64 bytes");
        auto mapping = std::make_shared<FileMapping>(file, offset + bytes);
        data_ = mapping->data() + offset;
        owner_ = mapping;
    }

    // The place of the next matrix, with nothing in it yet, or with what the file holds.
    Packed place(PackFormat format, int64_t rows, int64_t columns) {
        const int64_t bytes = packed_bytes(format, rows, columns), at = used_;
        if (at + bytes > bytes_) throw std::invalid_argument("the slab is full");
        used_ += bytes;
        return {kvseal::place(format, rows, columns, data_ + at), bytes, owner_, writable_ == nullptr ? nullptr : writable_ + at};
    }

    // Of the whole slab, places not yet taken included.
    Digest digest() const { return digest_of(data_, static_cast<size_t>(bytes_), 0); }
    const uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    int64_t used() const { return used_; }
    const std::shared_ptr<const void>& owner() const { return owner_; }

  private:
    std::shared_ptr<const void> owner_;
    const uint8_t* data_ = nullptr;
    uint8_t* writable_ = nullptr;
    int64_t bytes_, used_ = 0;
};

}  // namespace kvseal
