#include "cuda/memory/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/sync.h"
#include "core/types.h"

namespace ringcomm::cuda {

namespace {

constexpr std::size_t kTableBytes = round_up(sizeof(RankTable), kLineBytes);
constexpr std::size_t kAlign = 512;                // of what allocate gives: whole sectors, whole vectors
constexpr std::size_t kSmallestArena = 32u << 20;  // later ones are larger: there can be kMaxArenas
constexpr std::size_t kDoublings = 4, kArenasOfASize = 8;

void check_layout(int rank, const Layout& layout) {
  const int w = layout.world_size;
  if (w > kMaxRanks)
    fail(ErrorCode::kUnsupported, "communicator: rank ", rank, " expected at most ", kMaxRanks,
         " ranks, which is what the cuda engine serves, got ", w, "; use NCCL for more");
  if (w < 1 || rank < 0 || rank >= w)
    fail(ErrorCode::kInvalid, "communicator: expected 0 <= rank < world_size, got rank ", rank, " of ", w,
         "; pass the rank's number and the number of ranks");
  const bool fits = layout.channels >= 1 && layout.channels <= kMaxChannels && layout.p2p_channels >= 1 &&
                    layout.p2p_channels <= kMaxChannels && layout.depth >= 2 && layout.p2p_depth >= 2 &&
                    layout.slot_bytes >= kLineBytes && layout.slot_bytes % kLineBytes == 0 &&
                    layout.p2p_slot_bytes >= kLineBytes && layout.p2p_slot_bytes % kLineBytes == 0 &&
                    layout.stage_bytes > 0 && layout.stage_bytes % (kLineBytes * w) == 0 &&
                    (layout.packet_bytes > 0) == (w <= kMaxPacketRanks) && layout.packet_bytes % 1920 == 0;
  if (!fits)
    fail(ErrorCode::kInvalid, "communicator: rank ", rank, " expected 1 to ", kMaxChannels,
         " channels, 2 slots or more per link and sizes above 0, got ", text_of(layout),
         "; see the options channels and slot_bytes, and RINGCOMM_CUDA_LAYOUT");
}

}  // namespace

// ---- what ranks of one process share --------------------------------------------------------------------------------

Registry<Identity, PeerMemory::ProcessMemory>& PeerMemory::process_memory() {
  static auto* const all = new Registry<Identity, ProcessMemory>;  // outlives whatever may still be destroyed at exit
  return *all;
}

PeerMemory::ProcessMemory::~ProcessMemory() {
  if (!page || process_is_ending() || pid != getpid()) return;
  try {
    const DeviceScope on(device, -1);
    tolerate(cudaFreeHost(page), "cudaFreeHost");
  } catch (const Error&) {
    // The context is lost, and the page with it.
  }
}

std::shared_ptr<DeviceMemory> PeerMemory::ProcessMemory::find(const Identity& arena) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& memory : arenas)
    if (memory->handle().identity == arena) return memory;
  return nullptr;
}

void PeerMemory::ProcessMemory::forget(const std::shared_ptr<DeviceMemory>& arena) {
  const std::lock_guard<std::mutex> lock(mutex);
  arenas.erase(std::remove(arenas.begin(), arenas.end(), arena), arenas.end());
}

// ---- construction, destruction, stop --------------------------------------------------------------------------------

PeerMemory::PeerMemory(int rank, int world_size, int device, const EngineOptions& options)
    : PeerMemory(rank, device, default_layout(world_size, options), options.timeout_ms) {}

PeerMemory::PeerMemory(int rank, int device, const Layout& layout, std::int64_t timeout_ms)
    : rank_(rank), device_(device), layout_(layout), timeout_ms_(timeout_ms), bases_(kMaxRanks * kMaxRegions) {
  check_layout(rank, layout);
  facts_ = facts_of(device, rank);
  deferred_frees::sweep();
  control_ = std::make_unique<ControlSocket>();
  own_identity_ = random_identity();
  const DeviceScope on(device_, rank_);
  try {
    allocate_own();
    write_own_probe();
  } catch (...) {
    free_own();
    throw;
  }
  process_memory().add(own_identity_, own_);
}

void PeerMemory::allocate_own() {
  own_ = std::make_shared<ProcessMemory>();
  own_->device = device_;
  own_->pid = getpid();
  own_->segment = DeviceMemory::create(device_, layout_.segment_bytes(), true, "the segment", rank_);
  void *page = nullptr, *table = nullptr;
  check(cudaHostAlloc(&page, sizeof(HostPage), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc of the host page", rank_);
  std::memset(page, 0, sizeof(HostPage));
  own_->page = static_cast<HostPage*>(page);
  own_->page->one.value = 1;
  check(cudaHostGetDevicePointer(&page, own_->page, 0), "cudaHostGetDevicePointer of the host page", rank_);
  own_->device_page = static_cast<HostPage*>(page);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", rank_);
  check(cudaMalloc(&table, kTableBytes + kLineBytes), "cudaMalloc of the table of addresses", rank_);
  table_ = static_cast<char*>(table);
  check(cudaMemsetAsync(table_, 0, kTableBytes + kLineBytes, stream_), "clearing the table of addresses", rank_);
  set_entry(offsetof(RankTable, host), own_->device_page);
  set_segment(rank_, own_->segment->data());
}

PeerMemory::~PeerMemory() {
  if (own_->pid != getpid()) return;  // a forked child: nothing of this is its own
  process_memory().remove(own_identity_);
  if (process_is_ending()) return;
  close_peers();
  free_own();
  deferred_frees::sweep();
}

// Closes what this rank has opened, and leaves to deferred_frees the memory that others still have open.
void PeerMemory::close_peers() noexcept {
  buffers_.reset();
  std::vector<deferred_frees::Peer> peers;
  deferred_frees::Messages unsent;
  ControlMessage message;
  while (control_->receive(0)) continue;
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    Peer& peer = peers_[p];
    if (p == rank_ || peer.here()) continue;
    peer.opened.clear();
    ControlMessage closed;
    closed.kind = ControlMessage::kClosed;
    closed.from = rank_;
    const ControlSocket::Address& to = peer.handle.control;
    if (control_->send(to, closed) == ControlSocket::SendResult::kFull) unsent.emplace_back(to, std::move(closed));
    if (connected_ || control_->take(ControlMessage::kAttached, p, nullptr, message))
      peers.push_back({p, peer.handle.process});
  }
  std::vector<std::shared_ptr<DeviceMemory>> memories{own_->segment};
  memories.insert(memories.end(), own_->arenas.begin(), own_->arenas.end());
  const auto counted = [](const auto& memory) { return memory->handle().kind != HandleKind::kIpc; };
  memories.erase(std::remove_if(memories.begin(), memories.end(), counted), memories.end());  // the driver counts users
  if (memories.empty()) peers.clear();
  if (!peers.empty() || !unsent.empty())
    deferred_frees::add(std::move(control_), std::move(memories), std::move(peers), std::move(unsent));
}

void PeerMemory::free_own() noexcept {
  try {
    const DeviceScope on(device_, rank_);
    if (stream_) {
      tolerate(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      tolerate(cudaStreamDestroy(stream_), "cudaStreamDestroy");
    }
    if (table_) tolerate(cudaFree(table_), "cudaFree");
  } catch (const Error&) {
    // The context is lost, and all of it with it.
  }
  stream_ = nullptr;
  table_ = nullptr;
}

RankArgs PeerMemory::args() const {
  RankArgs args{};
  args.rank = rank_;
  args.factor = 1;
  args.segment = segment(rank_);
  args.table = reinterpret_cast<const RankTable*>(table_);
  return args;
}

HostPage* PeerMemory::page() const { return own_->page; }

char* PeerMemory::scratch() const { return table_ + kTableBytes; }

void PeerMemory::copy(void* target, const void* source, std::size_t nbytes, const char* what) const {
  const DeviceScope on(device_, rank_);
  check(cudaMemcpyAsync(target, source, nbytes, cudaMemcpyDefault, stream_), what, rank_);
  check(cudaStreamSynchronize(stream_), what, rank_);
}

void PeerMemory::stop() noexcept {
  stopped_ = true;
  const std::lock_guard<std::mutex> lock(peers_mutex_);
  store_release(&own_->page->abort.value, 1);
  for (const Peer& peer : peers_)
    if (peer.here()) store_release(&peer.own->page->abort.value, 1);
  try {
    const DeviceGuard guard(device_, rank_);
    const Flag* const one = &own_->page->one.value;
    for (const auto& segment : segments_)
      if (char* const flag = segment.load())
        tolerate(cudaMemcpyAsync(flag, one, sizeof(Flag), cudaMemcpyDefault, stream_), "setting an abort flag");
  } catch (const Error&) {
    // Without a context no kernel of this rank waits; the peers have their own time limits.
  }
}

void PeerMemory::await_stop(std::chrono::milliseconds limit) const noexcept {
  if (!stream_) return;
  const auto end = std::chrono::steady_clock::now() + limit;
  try {
    const DeviceScope on(device_, rank_);
    while (cudaStreamQuery(stream_) == cudaErrorNotReady && std::chrono::steady_clock::now() < end) usleep(100);
  } catch (const Error&) {
    // as in stop()
  }
}

// ---- arenas ---------------------------------------------------------------------------------------------------------

std::size_t PeerMemory::num_arenas() const {
  const std::lock_guard<std::mutex> lock(arenas_mutex_);
  return arenas_.size();
}

// While an arena is being created, the socket is in use; the peers' messages then wait for the next call.
void PeerMemory::attend(const char* call) {
  if (!buffers_) return;
  const std::unique_lock<std::mutex> lock(exchange_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const RelaxedCapture relaxed(rank_);
  buffers_->attend(*control_, call);
}

ControlSocket::SendResult PeerMemory::send(int peer, const ControlMessage& message) {
  return control_->send(peers_[peer].handle.control, message);
}

bool PeerMemory::receive(ControlMessage::Kind kind, int from, std::uint64_t last, int timeout_ms,
                         ControlMessage& message) {
  const std::unique_lock<std::mutex> lock(exchange_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    usleep(static_cast<useconds_t>(timeout_ms) * 1000);
    return false;
  }
  if (control_->take(kind, from, last, message)) return true;
  if (timeout_ms == 0 || !control_->receive(timeout_ms)) return false;
  while (control_->receive(0)) continue;
  return control_->take(kind, from, last, message);
}

void PeerMemory::read_messages() {
  const std::unique_lock<std::mutex> lock(exchange_mutex_, std::try_to_lock);
  while (lock.owns_lock() && control_->receive(0)) continue;
}

void PeerMemory::close_unused_mappings() {
  const RelaxedCapture relaxed(rank_);
  buffers_->close_unused();
}

void PeerMemory::called() {
  if (buffers_) buffers_->called();
}

Location PeerMemory::locate(const void* data, std::size_t nbytes, bool captured, const char* call) {
  const Location own = locate_own(data, nbytes);
  if (own.visible || user_memory_hidden_ || !connected_) return own;
  if (buffers_) return buffers_->locate(data, nbytes, captured, call);
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  if (is_from_cuda_malloc(data, nbytes)) return {-1, 1, begin};  // peer access is enabled between the devices
  if (nbytes >= kLeastShown) warn_staged(call, rank_, kForeignMemory);
  return own;
}

Location PeerMemory::locate_own(const void* data, std::size_t nbytes) const {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  if (one_device_ && !user_memory_hidden_) return {-1, 1, begin};
  const std::lock_guard<std::mutex> lock(arenas_mutex_);
  for (std::size_t i = 0; i < arenas_.size(); ++i) {
    const DeviceMemory& memory = *arenas_[i].memory;
    const auto base = reinterpret_cast<std::uint64_t>(memory.data());
    if (begin < base || begin + nbytes > base + memory.nbytes()) continue;
    if (one_process_) return {-1, 1, begin};
    return {static_cast<std::int32_t>(i), 1, begin - base};
  }
  return {-1, 0, 0};
}

void* PeerMemory::allocate(std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(arenas_mutex_);
  const std::size_t rounded = round_up(std::max<std::size_t>(nbytes, 1), kAlign);
  for (Arena& arena : arenas_)
    if (const auto offset = arena.pieces.take(rounded)) return arena.memory->data() + *offset;
  return nullptr;
}

void PeerMemory::release(void* data) {
  const std::lock_guard<std::mutex> lock(arenas_mutex_);
  for (Arena& arena : arenas_) {
    const auto offset = reinterpret_cast<std::uint64_t>(data) - reinterpret_cast<std::uint64_t>(arena.memory->data());
    if (arena.pieces.taken().count(offset) == 0) continue;
    arena.pieces.give_back(offset);
    return;
  }
  fail(ErrorCode::kInvalid, "release: rank ", rank_, " expected memory from allocate, got ", data,
       "; release it once, on the communicator it came from");
}

void PeerMemory::set_region(int peer, int region, char* base) {
  bases_[peer * kMaxRegions + region] = base;
  set_entry(offsetof(RankTable, regions) + (peer * kMaxRegions + region) * sizeof(char*), base);
}

void PeerMemory::set_segment(int peer, char* segment) {
  segments_[peer] = segment;
  set_entry(offsetof(RankTable, segments) + peer * sizeof(char*), segment);
}

void PeerMemory::set_entry(std::size_t at, const void* pointer) {
  copy(table_ + at, &pointer, sizeof pointer, "writing to the table of addresses");
}

void PeerMemory::add_arena(const Mapped& memories) {
  const std::lock_guard<std::mutex> lock(arenas_mutex_);
  const std::size_t number = arenas_.size();
  for (int peer = 0; peer < static_cast<int>(memories.size()); ++peer)
    if (memories[peer]) set_region(peer, static_cast<int>(number), memories[peer]->data());
  const std::shared_ptr<DeviceMemory>& own = memories[rank_];
  arenas_.push_back({own, Pieces(own->nbytes())});
}

std::string PeerMemory::create_arena(std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(exchange_mutex_);
  const std::size_t number = num_arenas();
  if (number == kMaxArenas)
    fail(ErrorCode::kSystem, "empty: rank ", rank_, " has used all ", kMaxArenas,
         " arenas of this communicator; release arrays or use fewer, larger ones");
  const std::size_t least = kSmallestArena << std::min(number / kArenasOfASize, kDoublings);
  pending_arena_ = DeviceMemory::create(device_, std::max(nbytes, least), false, "an arena", rank_);
  const std::lock_guard<std::mutex> own_lock(own_->mutex);
  own_->arenas.push_back(pending_arena_);
  return {reinterpret_cast<const char*>(&pending_arena_->handle()), kArenaHandleBytes};
}

void PeerMemory::grow(std::size_t nbytes) {
  if (!one_process_)
    fail(ErrorCode::kInvalid, "empty: rank ", rank_,
         " expected all ranks in this process, got some elsewhere; agree on an arena with create_arena and add_arenas");
  create_arena(nbytes);
  for (const Peer& peer : peers_)
    if (peer.here()) pending_arena_->grant(peer.own->device, rank_);
  Mapped memories(world_size());
  memories[rank_] = pending_arena_;
  add_arena(memories);
  pending_arena_->close_fd();
  pending_arena_.reset();
}

}  // namespace ringcomm::cuda
