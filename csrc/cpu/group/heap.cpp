#include "cpu/group/heap.h"

#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/schedule.h"
#include "core/types.h"

namespace ringcomm::cpu {

namespace {

constexpr std::size_t kArenaBytes = 256u << 20;  // of address space; pages are allocated when they are touched
constexpr std::size_t kMostBytes = std::size_t{1} << 62;
constexpr std::size_t kAlign = 4096;  // complete pages are given back to the system
constexpr std::size_t kHugePage = 2u << 20;

}  // namespace

void* Heap::allocate(std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (nbytes > kMostBytes)
    fail(ErrorCode::kInvalid, "empty: rank ", group_.rank(), " expected at most ", kMostBytes, " bytes, got ", nbytes,
         "; ask for less");
  const std::size_t rounded = round_up(larger(nbytes, 1), kAlign);
  for (auto& arena : arenas_)
    if (const auto offset = arena->pieces.take(rounded)) return arena->memory.data() + *offset;
  SharedMemory memory = SharedMemory::create("ringcomm-arena", round_up(larger(rounded, kArenaBytes), kHugePage));
  const int number = group_.add_arena(memory);
  Pieces pieces(memory.nbytes());
  const std::size_t offset = *pieces.take(rounded);
  arenas_.push_back(std::make_unique<Arena>(Arena{std::move(memory), number, std::move(pieces)}));
  return arenas_.back()->memory.data() + offset;
}

void Heap::release(void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& arena : arenas_) {
    const char* base = arena->memory.data();
    if (data < base || data >= base + arena->memory.nbytes()) continue;
    const auto piece = arena->pieces.taken().find(static_cast<char*>(data) - base);
    if (piece == arena->pieces.taken().end()) break;
    arena->memory.discard(piece->first, piece->second);
    arena->pieces.give_back(piece->first);
    return;
  }
  fail(ErrorCode::kInvalid, "release: rank ", group_.rank(), " expected memory from allocate, got ", data,
       "; release it once, on the communicator it came from");
}

void Heap::detach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& arena : arenas_) {
    SharedMemory fresh = SharedMemory::create("ringcomm-arena", arena->memory.nbytes());
    for (const auto& [offset, nbytes] : arena->pieces.taken())
      std::memcpy(fresh.data() + offset, arena->memory.data() + offset, nbytes);
    arena->memory.become(std::move(fresh));
  }
}

Location Heap::locate(const void* data, std::size_t nbytes) const {
  if (group_.shares_address_space()) return {-1, 1, reinterpret_cast<std::uint64_t>(data)};
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& arena : arenas_) {
    const char* base = arena->memory.data();
    const char* begin = static_cast<const char*>(data);
    if (begin >= base && begin + nbytes <= base + arena->memory.nbytes())
      return {arena->number, 1, static_cast<std::uint64_t>(begin - base)};
  }
  return {-1, 0, 0};
}

}  // namespace ringcomm::cpu
