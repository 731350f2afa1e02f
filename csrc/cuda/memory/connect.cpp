// How the ranks of a group find each other. They open each other's memory, then every pair proves that one of them
// reads what the other has written: PCIe paths behind some IOMMU and ACS settings accept every call and deliver
// garbage. The ranks take these steps together, by message, so that a failure of one is an error on all.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/sync.h"
#include "cuda/memory/peer_memory.h"
#include "runtime/identity.h"

namespace ringcomm::cuda {

namespace {

constexpr std::int64_t kSendFailureMs = 2000;  // for all peers; those that hear nothing have their own time limits

std::int64_t now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

constexpr int kProbeWords = kLineBytes / sizeof(std::uint64_t);
using Probe = std::array<std::uint64_t, kProbeWords>;

// The pattern that `writer` writes into probe line `line` of a segment.
Probe probe_of(const Identity& writer, int line) {
  Probe probe;
  std::uint64_t x = writer[0] + 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(line + 1);
  for (auto& word : probe) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u + writer[1];
    word = x ^ x >> 31;
  }
  return probe;
}

}  // namespace

std::int64_t PeerMemory::deadline() const { return now_ms() + timeout_ms_; }

// ---- handles --------------------------------------------------------------------------------------------------------

std::string PeerMemory::handle() const {
  RankHandle h;
  h.machine = machine_identity({"pid", "net"});
  h.instance = process_number();
  h.process = Process::self();
  h.rank = rank_;
  h.layout = layout_;
  h.identity = own_identity_;
  h.control = control_->address();
  h.settings = settings_;
  h.device = device_;
  h.uuid = facts_.uuid;
  h.bus_id = facts_.bus_id;
  h.segment = own_->segment->handle();
  h.why_private = own_->segment->why_private();
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount", rank_);
  for (int other = 0; other < devices; ++other)
    if (other != device_) h.paths.emplace_back(facts_of(other, rank_).uuid, path_between(device_, other, rank_));
  return h.pack();
}

void PeerMemory::check_handle(int peer, const RankHandle& mine, const RankHandle& theirs) const {
  if (theirs.machine != mine.machine)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank_, " is on machine ", mine.machine, ", rank ", peer, " on ",
         theirs.machine, "; the cuda engine serves ranks of one host, in one PID and network namespace");
  if (theirs.rank != peer || theirs.layout.world_size != world_size())
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected the handle of rank ", peer, " of ", world_size(),
         ", got rank ", theirs.rank, " of ", theirs.layout.world_size, "; pass every rank's handle, in rank order");
  if (text_of(theirs.layout) != text_of(layout_))
    fail(ErrorCode::kMismatch, "connect: rank ", rank_, " has the layout ", text_of(layout_), ", rank ", peer, " has ",
         text_of(theirs.layout), "; give every rank the same options and the same RINGCOMM_CUDA_LAYOUT");
  if (theirs.settings != mine.settings)
    fail(ErrorCode::kMismatch, "connect: rank ", rank_, " on ", mine.device_text(), " has ", mine.settings, ", rank ",
         peer, " on ", theirs.device_text(), " has ", theirs.settings,
         "; use equal GPUs, and give every rank the same RINGCOMM_TUNING file, RINGCOMM_CUDA_THREADS and "
         "RINGCOMM_CUDA_APART");
  if (theirs.segment.nbytes < layout_.segment_bytes())
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected ", layout_.segment_bytes(), " bytes of rank ", peer,
         ", got ", theirs.segment.nbytes, "; install one version of ringcomm everywhere");
}

// Reads the handles and finds the ranks of this process.
void PeerMemory::read_handles(const std::vector<std::string>& handles) {
  if (static_cast<int>(handles.size()) != world_size())
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected ", world_size(), " handles, got ", handles.size(),
         "; pass every rank's handle, in rank order");
  std::vector<RankHandle> parsed;
  for (const std::string& text : handles) parsed.push_back(RankHandle::unpack(text, rank_));
  if (parsed[rank_].identity != own_identity_)
    fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected its own handle at place ", rank_,
         ", got another one; pass every rank's handle, in rank order");
  phase_ = parsed[0].identity;
  const std::lock_guard<std::mutex> lock(peers_mutex_);
  peers_.resize(world_size());
  for (int p = 0; p < world_size(); ++p) {
    peers_[p].handle = parsed[p];
    if (parsed[p].machine != parsed[rank_].machine || parsed[p].instance != parsed[rank_].instance) continue;
    peers_[p].own = p == rank_ ? own_ : process_memory().find(parsed[p].identity);
    if (!peers_[p].own)
      fail(ErrorCode::kAborted, "connect: rank ", rank_, " expected rank ", p,
           " in this process, got a rank that is closed already; create a new communicator on every rank");
  }
  identity_ = text_of(parsed[0].identity);
}

// ---- messages ------------------------------------------------------------------------------------------------------

// Receives the messages that have come; throws if a rank has failed in what the ranks are doing now.
void PeerMemory::check_failures() {
  while (control_->receive(0)) continue;
  ControlMessage message;
  if (!control_->take(ControlMessage::kFailed, -1, &phase_, message)) return;
  failure_known_ = true;
  fail(static_cast<ErrorCode>(message.code), call_, ": rank ", rank_,
       " expected all ranks to take part, got this from rank ", message.from, ": ", message.text);
}

// Throws if no message from `peer` can be expected any more.
void PeerMemory::check_peer(int peer, bool gone, std::int64_t deadline) const {
  if (gone)
    fail(ErrorCode::kAborted, call_, ": rank ", rank_, " expected rank ", peer, " (process ",
         peers_[peer].handle.process.pid, "), got no answer, since it has exited or closed; see its own error");
  if (stopped_)
    fail(ErrorCode::kAborted, call_, ": rank ", rank_, " expected rank ", peer,
         ", got an abort of this communicator; create a new one");
  if (now_ms() >= deadline)
    fail(ErrorCode::kTimeout, call_, ": rank ", rank_, " expected rank ", peer, " to take part within ",
         timeout_ms_ / 1000.0, " s, got no answer; see whether it has stalled or calls something else");
}

void PeerMemory::post(int peer, const ControlMessage& message, std::int64_t deadline) {
  for (;;) {
    const ControlSocket::SendResult sent = control_->send(peers_[peer].handle.control, message);
    if (sent == ControlSocket::SendResult::kSent) return;
    check_failures();  // says why the peer has gone
    check_peer(peer, sent == ControlSocket::SendResult::kUnreachable, deadline);
    control_->receive(1);
  }
}

ControlMessage PeerMemory::await(ControlMessage::Kind kind, int peer, std::int64_t deadline, const Identity& subject) {
  ControlMessage message;
  for (;;) {
    const bool gone =
        !peers_[peer].here() && peers_[peer].handle.process.has_exited();  // before its last message is read
    check_failures();
    if (control_->take(kind, peer, &subject, message)) return message;
    check_peer(peer, gone, deadline);
    control_->receive(static_cast<int>(std::clamp<std::int64_t>(deadline - now_ms(), 1, 100)));
  }
}

// Returns once every rank has reached this point.
void PeerMemory::barrier(ControlMessage::Kind kind, std::int64_t deadline) {
  ControlMessage message;
  message.kind = kind;
  message.from = rank_;
  message.subject = phase_;
  for (int p = 0; p < world_size(); ++p)
    if (p != rank_) post(p, message, deadline);
  for (int p = 0; p < world_size(); ++p)
    if (p != rank_) await(kind, p, deadline, phase_);
}

// A rank that learned of a failure from a message need not pass it on.
void PeerMemory::send_failure(const Error& error) noexcept {
  if (failure_known_) return;
  ControlMessage message;
  message.kind = ControlMessage::kFailed;
  message.from = rank_;
  message.subject = phase_;
  message.code = static_cast<std::int32_t>(error.code());
  message.text = error.what();
  const std::int64_t end = now_ms() + kSendFailureMs;
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p)
    while (p != rank_ && control_->send(peers_[p].handle.control, message) == ControlSocket::SendResult::kFull &&
           now_ms() < end)
      control_->receive(1);  // a peer whose queue is full may be waiting for room in this one
}

// ---- opening --------------------------------------------------------------------------------------------------------

// Gives this device access to the peer's. If this process does not see that device, the call that opens memory does it.
void PeerMemory::enable_peer_access(int peer) const {
  const RankHandle& theirs = peers_[peer].handle;
  if (theirs.uuid == facts_.uuid) return;
  int devices = 0, can = 0, other = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount", rank_);
  while (other < devices && facts_of(other, rank_).uuid != theirs.uuid) ++other;
  if (other == devices) return;
  check(cudaDeviceCanAccessPeer(&can, device_, other), "cudaDeviceCanAccessPeer", rank_);
  if (!can)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank_, " on GPU ", device_, " (", facts_.bus_id,
         ") expected to reach ", theirs.device_text(), " of rank ", peer,
         ", got no peer access between them; use NCCL here, or GPUs that are joined by NVLink or by a PCIe path with "
         "peer "
         "access (nvidia-smi topo -p2p r; ACS and IOMMU settings may forbid it)");
  if (!peers_[peer].here()) return;  // cudaIpcOpenMemHandle does it, without a context on the other device
  const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    check(status, "cudaDeviceEnablePeerAccess", rank_);
}

// Sends the peers what they need beside the handle.
void PeerMemory::offer(const DeviceMemory& memory, std::int64_t deadline) {
  if (memory.fd() < 0) return;
  ControlMessage message;
  message.kind = ControlMessage::kMemory;
  message.from = rank_;
  message.subject = memory.handle().identity;
  message.fd = memory.fd();
  for (int p = 0; p < world_size(); ++p)
    if (!peers_[p].here()) post(p, message, deadline);
}

// A peer's memory, as mapped on this rank.
std::shared_ptr<DeviceMemory> PeerMemory::map(int peer, const MemoryHandle& handle, std::int64_t deadline) {
  Peer& p = peers_[peer];
  if (p.here()) {
    auto memory = handle.identity == p.own->segment->handle().identity ? p.own->segment : p.own->find(handle.identity);
    if (!memory)
      fail(ErrorCode::kInvalid, "connect: rank ", rank_, " expected memory of rank ", peer,
           ", got a handle of memory that is gone; exchange the handles of one arena at a time");
    memory->grant(device_, rank_);
    return memory;
  }
  if (handle.kind == HandleKind::kPrivate)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank_, " expected a handle of the memory of rank ", peer, " on ",
         p.handle.device_text(), ", got none, since ", p.handle.why_private,
         "; run all ranks in one process, or use NCCL here");
  const int fd =
      handle.kind == HandleKind::kVmm ? await(ControlMessage::kMemory, peer, deadline, handle.identity).fd : -1;
  try {
    p.opened.push_back(DeviceMemory::open(handle, fd, device_, rank_, peer));
  } catch (const Error&) {
    check_failures();  // a better reason, if there is one
    check_peer(peer, p.handle.process.has_exited(), deadline);
    throw;
  }
  return p.opened.back();
}

// ---- probes of the mapped memory ------------------------------------------------------------------------------------

void PeerMemory::write_own_probe() {
  const Probe probe = probe_of(own_identity_, 0);
  copy(own_->segment->data() + layout_.probe_at(0), &probe, sizeof probe, "writing the probe line");
}

// Reads through memory of this device, so that the data takes the same path as in kernels.
void PeerMemory::read_probe(int peer) {
  Probe got{};
  copy(scratch(), segment(peer) + layout_.probe_at(0), sizeof got, "copying a peer's probe line");
  copy(&got, scratch(), sizeof got, "reading a probe line");
  if (got != probe_of(peers_[peer].handle.identity, 0)) broken_path(peer, "read what it had written");
}

void PeerMemory::write_probe(int peer) {
  const Probe probe = probe_of(own_identity_, 1 + rank_);
  copy(scratch(), &probe, sizeof probe, "writing a probe line");
  copy(segment(peer) + layout_.probe_at(1 + rank_), scratch(), sizeof probe, "copying a probe line to a peer");
}

void PeerMemory::check_written(int peer) {
  Probe got{};
  copy(&got, segment(rank_) + layout_.probe_at(1 + peer), sizeof got, "reading a probe line");
  if (got != probe_of(peers_[peer].handle.identity, 1 + peer)) broken_path(peer, "find what it wrote here");
}

void PeerMemory::broken_path(int peer, const char* expected) const {
  const RankHandle& theirs = peers_[peer].handle;
  const char* const cause =
      theirs.uuid == facts_.uuid
          ? "; sharing of device memory between them does not work here, update the driver or run them in one process"
          : "; the PCIe peer path is broken (switch off ACS and the IOMMU for these devices), use NCCL with "
            "NCCL_P2P_DISABLE=1 until it is repaired";
  fail(ErrorCode::kSystem, "connect: rank ", rank_, " on ", peers_[rank_].handle.device_text(), " and rank ", peer,
       " on ", theirs.device_text(), " share memory, and rank ", rank_, " expected to ", expected, ", got other data",
       cause);
}

// ---- connect, and collective arenas ---------------------------------------------------------------------------------

void PeerMemory::find_paths() {
  std::vector<std::vector<Path>> paths(world_size());
  worst_path_ = Path::kSame;
  for (int a = 0; a < world_size(); ++a) {
    int here = 0;
    for (int b = 0; b < world_size(); ++b) {
      const Path path = peers_[a].handle.path_to(peers_[b].handle);
      paths[a].push_back(path);
      worst_path_ = std::min(worst_path_, path.kind);
      here += path.kind == Path::kSame;
    }
    most_ranks_of_a_device_ = std::max(most_ranks_of_a_device_, here);
  }
  const std::vector<int> order = cuda::ring_order(paths);
  std::copy(order.begin(), order.end(), ring_order_);
}

// The ranks of one process on one device share a launch. The same on all ranks.
void PeerMemory::check_local_ranks() const {
  for (int p = 0; p < world_size(); ++p) {
    const RankHandle& first = peers_[p].handle;
    const auto count = std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      return peer.handle.instance == first.instance && peer.handle.uuid == first.uuid;
    });
    if (count > kMaxLaunchRanks)
      fail(ErrorCode::kUnsupported, "connect: rank ", rank_, " expected at most ", kMaxLaunchRanks,
           " ranks of one process on one GPU, got ", count, " with rank ", p, " on ", first.device_text(),
           "; start the others as processes, or on other GPUs");
  }
}

void PeerMemory::connect(const std::vector<std::string>& handles, const std::function<void()>& prepare) {
  const std::lock_guard<std::mutex> lock(exchange_mutex_);
  if (started_.exchange(true))
    fail(ErrorCode::kInvalid, "connect: rank ", rank_,
         " expected its first connect, got another one; make a new engine");
  const std::int64_t end = deadline();
  const DeviceGuard guard(device_, rank_);
  try {
    read_handles(handles);
    for (int p = 0; p < world_size(); ++p) check_handle(p, peers_[rank_].handle, peers_[p].handle);
    check_local_ranks();
    offer(*own_->segment, end);
    for (int p = 0; p < world_size(); ++p) {
      if (p == rank_) continue;
      enable_peer_access(p);
      set_segment(p, map(p, peers_[p].handle.segment, end)->data());
      read_probe(p);
      write_probe(p);
    }
    barrier(ControlMessage::kAttached, end);
    for (int p = 0; p < world_size(); ++p)
      if (p != rank_) check_written(p);
    one_process_ = std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.here(); });
    for (int p = 0; p < world_size(); ++p)
      if (peers_[p].here() && peers_[p].own->device == device_) local_ranks_.push_back(p);
    one_device_ = static_cast<int>(local_ranks_.size()) == world_size();
    find_paths();
    if (prepare) prepare();
    barrier(ControlMessage::kChecked, end);
  } catch (const Error& error) {
    send_failure(error);
    throw;
  }
  own_->segment->close_fd();
  if (!one_process_ && !user_memory_hidden_) {
    std::vector<Buffers::Peer> all;
    for (const Peer& peer : peers_) all.push_back({peer.handle.control, peer.here()});
    buffers_ = std::make_unique<Buffers>(rank_, device_, std::move(all),
                                         [this](int peer, int region, char* base) { set_region(peer, region, base); });
  }
  connected_ = true;
}

void PeerMemory::add_arenas(const std::vector<std::string>& handles) {
  const std::lock_guard<std::mutex> lock(exchange_mutex_);
  const std::shared_ptr<DeviceMemory> own = std::move(pending_arena_);
  std::vector<MemoryHandle> parsed(world_size());
  if (static_cast<int>(handles.size()) != world_size())
    fail(ErrorCode::kInvalid, "empty: rank ", rank_, " expected ", world_size(), " handles of arenas, got ",
         handles.size(), "; pass every rank's handle, in rank order");
  for (int p = 0; p < world_size(); ++p) {
    if (handles[p].size() == kArenaHandleBytes) std::memcpy(&parsed[p], handles[p].data(), kArenaHandleBytes);
    if (parsed[p].magic == kMemoryMagic && (p != rank_ || (own && parsed[p].identity == own->handle().identity)))
      continue;
    if (own) own_->forget(own);  // nobody opens it
    fail(ErrorCode::kSystem, "empty: rank ", rank_, " expected an arena of every rank, got none of rank ", p,
         "; see its own error, it may be out of device memory");
  }
  phase_ = parsed[0].identity;
  call_ = "empty";
  const std::int64_t end = deadline();
  Mapped memories(world_size());
  const DeviceGuard guard(device_, rank_);
  try {
    offer(*own, end);
    for (int p = 0; p < world_size(); ++p) memories[p] = p == rank_ ? own : map(p, parsed[p], end);
    barrier(ControlMessage::kAttached, end);
  } catch (const Error& error) {
    send_failure(error);
    throw;  // the arena stays with own_: some peer may have opened it
  }
  own->close_fd();
  add_arena(memories);
}

int PeerMemory::processes_on_device() const {
  std::vector<std::uint64_t> found;
  for (const Peer& peer : peers_)
    if (peer.handle.uuid == facts_.uuid) found.push_back(peer.handle.instance);
  std::sort(found.begin(), found.end());
  return static_cast<int>(std::unique(found.begin(), found.end()) - found.begin());
}

std::string PeerMemory::reach(int peer) const {
  if (peer == rank_) return "itself";
  return peers_[peer].here() ? "pointer" : cuda::name(peers_[peer].handle.segment.kind);
}

}  // namespace ringcomm::cuda
