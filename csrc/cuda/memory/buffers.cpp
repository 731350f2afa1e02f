#include "cuda/memory/buffers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#if !defined(RINGCOMM_EMULATE)
#include <cuda.h>
#endif

#include "core/error.h"
#include "cuda/memory/handle.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

namespace {

constexpr Location kStaged{-1, 0, 0};
constexpr std::uint64_t kInUse = ~std::uint64_t{0};  // no call is known that does not use it
// Between two searches for freed allocations, if no new allocation is a reason for one. Also before an allocation that
// was refused is offered again, for the first time.
constexpr std::uint64_t kCallsBetweenChecks = 64;
constexpr std::size_t kMostChecked = 192;  // allocations in one search, which asks the driver for each
constexpr int kMostUnanswered = 4;         // without an answer, to one peer: a socket's queue may have room for ten

std::uint32_t bit(int peer) { return 1u << peer; }
static_assert(kMaxRanks <= 32, "a set of peers has 32 bits");

}  // namespace

Allocation allocation_of(std::uint64_t address) {
  static auto* get = RINGCOMM_DRIVER(cuPointerGetAttributes);
  static auto* get_chunk = RINGCOMM_DRIVER(cuMemGetAddressRange);
  CUdeviceptr base = 0;
  std::size_t nbytes = 0;
  unsigned long long id = 0;
  int from_cuda_malloc = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                      CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&base, &nbytes, &id, &from_cuda_malloc};
  if (!get || get(4, attributes, values, address) != CUDA_SUCCESS) return {};
  if (from_cuda_malloc) return {base, nbytes, id};
  std::shared_ptr<const VmmReference> chunk = nbytes ? VmmReference::find(address) : nullptr;
  // Of virtual memory the attributes have the whole reserved range, and this function has what is mapped here.
  if (!chunk || !get_chunk || get_chunk(&base, &nbytes, address) != CUDA_SUCCESS) return {};
  const std::uint64_t number = chunk->number();
  return {base, nbytes, number, std::move(chunk)};
}

bool is_from_cuda_malloc(const void* data, std::size_t nbytes) {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  const Allocation allocation = allocation_of(begin);
  return !allocation.chunk && begin >= allocation.base && begin + nbytes <= allocation.end();
}

void warn_staged(const char* call, int rank, const std::string& got) {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  std::fprintf(stderr,
               "ringcomm: %s: rank %d expected a buffer that the peers can reach, got %s, so that it is copied through "
               "staging areas; allocate it with the communicator (comm.empty)\n",
               call, rank, got.c_str());
}

Buffers::Buffers(int rank, int device, std::vector<Peer> peers, std::function<void(int, int, char*)> set)
    : rank_(rank), device_(device), peers_(std::move(peers)), set_(std::move(set)) {}

std::uint32_t Buffers::all_peers() const { return ~std::uint32_t{0} >> (32 - peers_.size()) & ~bit(rank_); }

void Buffers::attend(ControlSocket& control, const char* call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (control.receive(0)) continue;
  ControlMessage message;
  while (control.take(ControlMessage::kOffer, -1, nullptr, message)) {
    open(message);
    if (message.fd >= 0) ::close(message.fd);
  }
  while (control.take(ControlMessage::kTaken, -1, nullptr, message)) handle_taken(message, call);
  while (control.take(ControlMessage::kWithdrawn, -1, nullptr, message)) handle_withdrawn(message);
  while (control.take(ControlMessage::kDropped, -1, nullptr, message)) handle_dropped(message);
  if (calls_ % kCallsBetweenChecks == 0) withdraw_freed();
  send(control);
}

void Buffers::called() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_;
}

// ---- the owner ------------------------------------------------------------------------------------------------------

Location Buffers::locate(const void* data, std::size_t nbytes, bool captured, const char* call) {
  const auto begin = reinterpret_cast<std::uint64_t>(data), end = begin + nbytes;
  const bool may_offer = nbytes >= kLeastShown;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<OwnAllocation*> parts;
  bool visible = true;
  std::uint64_t at = begin;
  do {
    const Allocation allocation = allocation_of(at);
    const bool whole = at == begin && end <= allocation.end();
    if (!whole && !allocation.chunk) {
      if (may_offer) warn_staged(call, rank_, kForeignMemory);
      return kStaged;
    }
    if (allocation.chunk && (begin / kWindowBytes != (end - 1) / kWindowBytes ||
                             allocation.region_base() + kWindowBytes < allocation.end())) {
      if (may_offer)
        warn_staged(call, rank_, "virtual memory on both sides of an address that is a multiple of 64 GiB");
      return kStaged;
    }
    OwnAllocation* part = nullptr;
    visible = show(allocation, may_offer, call, part) && visible;
    parts.push_back(part);
    at = allocation.end();
  } while (at < end);
  if (!visible) return kStaged;
  for (OwnAllocation* const part : parts) part->captured = part->captured || captured;
  return {static_cast<std::int32_t>(kMaxArenas + parts[0]->region), 1, begin - parts[0]->allocation.region_base()};
}

// Whether the peers see an allocation in the next call. If they do not, it is offered, now or later.
bool Buffers::show(const Allocation& allocation, bool may_offer, const char* call, OwnAllocation*& visible) {
  const auto own = find(allocation);
  if (own == allocations_.end()) {
    if (may_offer) offer(allocation, call);
    return false;
  }
  OwnAllocation& known = own->second;
  if (known.state == State::kRefused && known.region >= 0 && calls_ >= known.from) make_offer(known);
  visible = &known;
  return known.state == State::kVisible && calls_ >= known.from;
}

std::size_t Buffers::num_visible() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(allocations_.begin(), allocations_.end(),
                       [](const auto& own) { return own.second.state == State::kVisible; });
}

Buffers::OwnAllocations::iterator Buffers::find(const Identity& identity) {
  return std::find_if(allocations_.begin(), allocations_.end(),
                      [&](const auto& own) { return own.second.handle.identity == identity; });
}

Buffers::OwnAllocations::iterator Buffers::find(const Allocation& allocation) {
  const auto [begin, end] = allocations_.equal_range(allocation.base);
  const auto own = std::find_if(begin, end, [&](const auto& o) { return o.second.allocation == allocation; });
  return own == end ? allocations_.end() : own;
}

// Returns a free region, or the window's.
int Buffers::take_region(const Allocation& allocation) {
  const std::uint64_t base = allocation.region_base();
  const bool window = allocation.chunk != nullptr;
  auto region = std::find_if(regions_.begin(), regions_.end(),
                             [&](const Region& r) { return window && r.users > 0 && r.window && r.base == base; });
  if (region == regions_.end())
    region = std::find_if(regions_.begin(), regions_.end(), [](const Region& r) { return r.users == 0; });
  if (region == regions_.end()) return -1;
  *region = {base, window, region->users + 1};
  return static_cast<int>(region - regions_.begin());
}

void Buffers::forget(OwnAllocations::iterator own) {
  if (own->second.region >= 0) --regions_[own->second.region].users;
  allocations_.erase(own);
}

// The offers are sent at the next call.
void Buffers::offer(const Allocation& allocation, const char* call) {
  withdraw_freed();
  for (auto own = allocations_.begin(); own != allocations_.end();) {  // not all virtual memory has been checked
    const auto here = own++;
    if (here->second.allocation.overlaps(allocation)) handle_freed(here);
  }
  OwnAllocation own;
  own.allocation = allocation;
  own.handle.magic = kMemoryMagic;
  own.handle.kind = HandleKind::kIpc;
  own.handle.address = allocation.base;
  own.handle.nbytes = allocation.nbytes;
  std::string why_not;
  if (allocation.chunk) {
    own.handle.kind = allocation.chunk->handle_kind(device_);
    static_assert(sizeof own.handle.ipc >= kFabricBytes, "a handle has room for the driver's");
    if (own.handle.kind == HandleKind::kPrivate ||
        (own.handle.kind == HandleKind::kFabric && !allocation.chunk->export_fabric(&own.handle.ipc)))
      why_not = kUnexportableMemory;
  } else {
    const RelaxedCapture relaxed(rank_);
    const cudaError_t status = cudaIpcGetMemHandle(&own.handle.ipc, reinterpret_cast<void*>(allocation.base));
    if (status != cudaSuccess) {
      cudaGetLastError();
      why_not = concat("memory for which cudaIpcGetMemHandle gave \"", cudaGetErrorString(status), "\"");
    }
  }
  if (why_not.empty()) {
    own.region = take_region(allocation);
    if (own.region < 0)
      return warn_staged(call, rank_, concat("more than ", kMaxBuffers, " allocations in use at a time"));
    make_offer(own);
  } else {
    own.state = State::kRefused;
    warn_staged(call, rank_, why_not);
  }
  allocations_.emplace(allocation.base, std::move(own));
}

void Buffers::make_offer(OwnAllocation& own) {
  own.state = State::kOffered;
  own.refused = false;
  own.handle.identity = random_identity();
  own.from = 0;
  own.notified = 0;
  own.open = all_peers();
  has_unsent_ = true;
}

void Buffers::withdraw(OwnAllocation& own) {
  own.state = State::kWithdrawn;
  own.from = calls_;
  own.notified = 0;
  own.open = all_peers();
  has_unsent_ = true;
}

void Buffers::handle_freed(OwnAllocations::iterator own) {
  if (own->second.state == State::kWithdrawn || own->second.captured) return;
  if (own->second.state == State::kRefused)
    forget(own);
  else
    withdraw(own->second);
}

// Each search continues where the last one ended.
void Buffers::withdraw_freed() {
  if (checked_call_ == calls_) return;
  checked_call_ = calls_;
  auto next = allocations_.upper_bound(last_checked_);
  for (std::size_t left = std::min(allocations_.size(), kMostChecked); left > 0; --left) {
    if (next == allocations_.end()) next = allocations_.begin();
    const auto own = next++;
    last_checked_ = own->first;
    if (!(allocation_of(last_checked_) == own->second.allocation)) handle_freed(own);
  }
}

void Buffers::handle_taken(const ControlMessage& message, const char* call) {
  --unanswered_[message.from];
  const auto found = find(message.subject);
  if (found == allocations_.end() || found->second.state != State::kOffered) return;
  OwnAllocation& own = found->second;
  if (message.code != 0) {
    own.refused = allocation_of(own.allocation.base) == own.allocation;  // not freed
    if (own.refused) warn_staged(call, rank_, concat("memory that rank ", message.from, " could not open"));
    return withdraw(own);
  }
  own.open &= ~bit(message.from);
  own.from = std::max(own.from, message.call);
  if (own.open == 0) own.state = State::kVisible;
}

void Buffers::handle_dropped(const ControlMessage& message) {
  --unanswered_[message.from];
  const auto found = find(message.subject);
  if (found == allocations_.end() || found->second.state != State::kWithdrawn) return;
  OwnAllocation& own = found->second;
  own.open &= ~bit(message.from);
  has_unsent_ = true;  // an offer may have waited for this
  if (own.open != 0) return;
  if (!own.refused) return forget(found);
  own.state = State::kRefused;
  own.from = calls_ + (kCallsBetweenChecks << std::min(own.refusals++, 10));
}

// ---- the peer -------------------------------------------------------------------------------------------------------

void Buffers::open(const ControlMessage& offer) {
  MemoryHandle handle;
  if (!unpack(offer.text, handle) || offer.code < 0 || offer.code >= kMaxBuffers || offer.from < 0 ||
      offer.from >= static_cast<int>(peers_.size()))
    return;
  PeerAllocation opened{offer.from, kMaxArenas + offer.code, offer.subject, kInUse, nullptr, nullptr};
  try {
    map(handle, offer.fd, opened);
  } catch (const Error&) {
    return answer(offer.from, offer.subject, ControlMessage::kTaken, false);
  }
  opened_.push_back(std::move(opened));
  answer(offer.from, offer.subject, ControlMessage::kTaken, true);
}

void Buffers::map(const MemoryHandle& handle, int fd, PeerAllocation& opened) {
  const bool here = peers_[opened.peer].here;
  const auto other = std::find_if(opened_.begin(), opened_.end(), [&](const PeerAllocation& o) {
    return o.peer == opened.peer && o.region == opened.region;
  });
  if (handle.kind == HandleKind::kIpc) {
    auto* base = reinterpret_cast<char*>(handle.address);
    if (!here) {
      const auto memory = DeviceMemory::open(handle, -1, device_, rank_, opened.peer);
      base = memory->data();
      opened.memory = memory;
    }
    return set_(opened.peer, opened.region, base);
  }
  const std::uint64_t base = handle.address / kWindowBytes * kWindowBytes;
  if (here) {
    if (!vmm_is_granted(handle.address, device_))
      fail(ErrorCode::kUnsupported, "its owner has not made it accessible to this device");
    if (other == opened_.end()) set_(opened.peer, opened.region, reinterpret_cast<char*>(base));
    return;
  }
  const DeviceGuard guard(device_, rank_);
  if (handle.address + handle.nbytes > base + kWindowBytes) fail(ErrorCode::kInvalid, "it is in no window");
  opened.window = other == opened_.end() ? std::make_shared<VmmWindow>(kWindowBytes, rank_) : other->window;
  const void* const fabric = handle.kind == HandleKind::kFabric ? &handle.ipc : nullptr;
  opened.memory = VmmWindow::map(opened.window, handle.address - base, handle.nbytes, fd, fabric, device_, rank_);
  if (other == opened_.end()) set_(opened.peer, opened.region, opened.window->data());
}

void Buffers::handle_withdrawn(const ControlMessage& message) {
  const auto opened = std::find_if(opened_.begin(), opened_.end(),
                                   [&](const PeerAllocation& o) { return o.identity == message.subject; });
  if (opened == opened_.end()) return answer(message.from, message.subject, ControlMessage::kDropped, true);
  opened->until = message.call;
}

bool Buffers::has_unused() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(opened_.begin(), opened_.end(), [&](const PeerAllocation& o) { return calls_ >= o.until; });
}

// The owner gets its answer after closing: until then the driver would refuse another mapping of the same address.
void Buffers::close_unused() {
  std::list<PeerAllocation> unused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto opened = opened_.begin(); opened != opened_.end();) {
      const auto here = opened++;
      if (calls_ < here->until) continue;
      unused.splice(unused.end(), opened_, here);
      const auto same = [&](const PeerAllocation& o) { return o.peer == here->peer && o.region == here->region; };
      if (std::none_of(opened_.begin(), opened_.end(), same)) set_(here->peer, here->region, nullptr);
    }
  }
  for (PeerAllocation& opened : unused) {
    opened.memory.reset();
    opened.window.reset();
    const std::lock_guard<std::mutex> lock(mutex_);
    answer(opened.peer, opened.identity, ControlMessage::kDropped, true);
  }
}

// ---- messages -------------------------------------------------------------------------------------------------------

void Buffers::answer(int peer, const Identity& subject, ControlMessage::Kind kind, bool done) {
  ControlMessage message;
  message.kind = kind;
  message.from = rank_;
  message.subject = subject;
  message.call = calls_;
  message.code = done ? 0 : 1;
  answers_.emplace_back(peer, std::move(message));
}

// A peer that has closed gets no more messages: it counts as one that does not answer.
void Buffers::send(ControlSocket& control) {
  const auto arrives = [&](int peer, const ControlMessage& message) {
    return control.send(peers_[peer].control, message) != ControlSocket::SendResult::kFull;
  };
  answers_.erase(std::remove_if(answers_.begin(), answers_.end(),
                                [&](const auto& answer) { return arrives(answer.first, answer.second); }),
                 answers_.end());
  if (!std::exchange(has_unsent_, false)) return;
  // Withdrawals first: the driver refuses to map an address that the peer still has mapped.
  for (const State state : {State::kWithdrawn, State::kOffered})
    for (auto& [address, own] : allocations_)
      for (int p = 0; p < static_cast<int>(peers_.size()); ++p)
        if (p != rank_ && own.state == state && !(own.notified & bit(p)) && !notify(control, own, p))
          has_unsent_ = true;
}

// Whether a peer has yet to close an earlier allocation at the same address.
bool Buffers::is_blocked(const OwnAllocation& own, int peer) const {
  return own.state == State::kOffered && std::any_of(allocations_.begin(), allocations_.end(), [&](const auto& other) {
           return other.second.state == State::kWithdrawn && (other.second.open & bit(peer)) &&
                  other.second.allocation.overlaps(own.allocation);
         });
}

// Sends an offer or a withdrawal. False: it has to wait.
bool Buffers::notify(ControlSocket& control, OwnAllocation& own, int peer) {
  if (unanswered_[peer] >= kMostUnanswered || is_blocked(own, peer)) return false;
  ControlMessage message;
  message.kind = own.state == State::kOffered ? ControlMessage::kOffer : ControlMessage::kWithdrawn;
  message.from = rank_;
  message.code = own.region;
  message.subject = own.handle.identity;
  message.call = own.from;
  if (message.kind == ControlMessage::kOffer) message.text = pack(own.handle);
  if (message.kind == ControlMessage::kOffer && own.handle.kind == HandleKind::kVmm && !peers_[peer].here) try {
      message.fd = vmm_export(own.allocation.chunk->number(), rank_);
    } catch (const Error&) {
      // out of file descriptors: the peer will answer that it cannot open it
    }
  const bool sent = control.send(peers_[peer].control, message) != ControlSocket::SendResult::kFull;
  if (message.fd >= 0) ::close(message.fd);
  if (!sent) return false;
  own.notified |= bit(peer);
  ++unanswered_[peer];
  return true;
}

}  // namespace ringcomm::cuda
