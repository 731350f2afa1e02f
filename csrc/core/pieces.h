// Allocates pieces of a range of bytes, first fit; neighbouring free pieces are merged. Callers must hold a lock.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>

namespace ringcomm {

class Pieces {
 public:
  explicit Pieces(std::size_t nbytes) : free_{{0, nbytes}} {}

  // Returns the offset of a new piece; nothing if no free piece is large enough.
  std::optional<std::size_t> take(std::size_t nbytes) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [offset, available] = *it;
      if (available < nbytes) continue;
      free_.erase(it);
      if (available > nbytes) free_.emplace(offset + nbytes, available - nbytes);
      taken_.emplace(offset, nbytes);
      return offset;
    }
    return std::nullopt;
  }

  // `offset`: the beginning of a taken piece.
  void give_back(std::size_t offset) {
    const auto piece = taken_.find(offset);
    std::size_t nbytes = piece->second;
    taken_.erase(piece);
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && offset + nbytes == after->first) {
      nbytes += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += nbytes;
        return;
      }
    }
    free_.emplace(offset, nbytes);
  }

  // The pieces in use: the size of each by its offset.
  const std::map<std::size_t, std::size_t>& taken() const { return taken_; }

 private:
  std::map<std::size_t, std::size_t> free_, taken_;
};

}  // namespace ringcomm
