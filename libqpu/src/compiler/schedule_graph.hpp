// Dependence graph of the operations of one basic block, the input of the list scheduler. Philip B. Gibbons and Steven
// S. Muchnick, "Efficient Instruction Scheduling for a Pipelined Architecture", 1986.
#ifndef QPU_SRC_COMPILER_SCHEDULE_GRAPH_HPP
#define QPU_SRC_COMPILER_SCHEDULE_GRAPH_HPP

#include <array>
#include <cstdint>
#include <vector>

#include "compiler/allocate.hpp"

namespace qpu::compiler {

constexpr std::uint32_t kNone = UINT32_MAX;

// The number of requests that can safely be in flight in one TMU. Failures have been observed
// with more.
constexpr std::uint32_t kTmuDepth = 4;
// Latencies that the scheduler assumes, in instructions of 4 clocks: the defaults of the
// emulator's model for a Pi 3 (docs/model.md). Wrong values only make code slower. The test
// `levels` compares the values with the model.
constexpr int kTmuLatency = 20;          // tmu_memory_clocks
constexpr int kTmuRequest = 4;           // tmu_request_clocks
constexpr int kSlowTmuLatency = 26;      // the same two at the slow end of their ranges
constexpr int kSlowTmuRequest = 5;
constexpr int kDmaStoreSetup = 14;       // store_ns
constexpr int kDmaStoreRow = 5;          // store_burst_ns and store_word_ns of 16 words
constexpr int kDmaLoadSetup = 22;        // load_ns
constexpr int kDmaLoadRow = 7;           // load_burst_ns and load_word_ns of 16 words

// The hazards in the manual, in instructions.
constexpr int kVpmReadLatency = 4;
constexpr int kNoSwapLatency = 3;
constexpr int kSfuLatency = 3;

constexpr std::uint8_t kRotateByR5 = 16;

// Bit masks of the two pipes, of the register files, and of units that an instruction can access once.
constexpr std::uint8_t kAddPipe = 1;
constexpr std::uint8_t kMulPipe = 2;
constexpr std::uint8_t kToA = 1;
constexpr std::uint8_t kToB = 2;
constexpr std::uint8_t kToNeither = 4;
constexpr std::array<std::uint8_t, 3> kFiles{kToA, kToB, kToNeither};
constexpr std::uint8_t kUnitAccess = 1;  // TMU, SFU, mutex, semaphore
constexpr std::uint8_t kVpmAccess = 2;   // VPM, DMA and receives
constexpr std::uint8_t kR5Access = 4;

struct Source {
  enum class Kind : std::uint8_t { None, Value, Small, ReadA, ReadB, ReadEither };
  Kind kind = Kind::None;
  std::uint32_t number = 0;  // of a value, a small-immediate code, or an address
  bool isValue() const { return kind == Kind::Value; }
};

struct Node {
  enum class Form : std::uint8_t { Alu, Load, LoadSigned, LoadUnsigned, Receive, Wait, Semaphore };
  Form form = Form::Alu;
  std::uint8_t pipes = 0;
  isa::AddOp add = isa::AddOp::Nop;
  isa::MulOp mul = isa::MulOp::Nop;
  isa::Cond cond = isa::Cond::Always;
  bool setsFlags = false;
  bool removed = false;
  bool isLiveOutCopy = false;  // moves value `a` to its home register
  bool quadSource = false;  // the rotation stays within the first quad
  std::uint8_t rotate = 0;  // 1..15 or kRotateByR5
  std::uint8_t address = isa::address::kNop;  // I/O address that is written instead of a register
  std::uint8_t files = kToNeither;            // files that have the address
  std::uint8_t exclusive = 0;
  std::uint8_t unit = 0;
  Place result = kNowhere;  // kR4 or kR5 if the result appears there
  Source a, b;
  std::uint32_t target = kNone;  // a value
  std::uint32_t constant = 0;
  std::uint32_t site = code::Object::kNoSite;
  std::uint32_t predecessors = 0;  // number of edges to this node
  std::int32_t height = 0;  // length of the critical path from here to the end of the block, in instructions

  bool canStall() const { return form == Form::Receive || form == Form::Wait; }
};

// The vector that a register holds between two full writes.
struct Value {
  Vreg vreg = 0;
  Place home = kNowhere;   // home register, if the vector is live in or live out
  bool liveIn = false;     // in its home register at the start
  bool liveOut = false;    // must be in its home register at the end
  std::uint32_t reads = 0;
  std::uint32_t updates = 0;    // conditional writes
  std::uint32_t rotations = 0;  // reads by rotations of all 16 elements
  std::uint32_t firstUse = 0, uses = 0;  // range of Graph::users
};

struct Edge {
  std::uint32_t to;
  std::int32_t latency;
};

struct Edges {
  const Edge* first;
  const Edge* last;
  const Edge* begin() const { return first; }
  const Edge* end() const { return last; }
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<Value> values;
  std::vector<std::uint32_t> users;      // nodes that read a value, by value
  std::vector<std::uint32_t> firstEdge;  // start of the edges of each node, and the end
  std::vector<Edge> edges;
  std::uint32_t lastFlags = kNone;       // node that sets the flags for the branch
  bool branches = false;                 // the block ends with a conditional branch

  Edges edgesOf(std::uint32_t node) const {
    return {edges.data() + firstEdge[node], edges.data() + firstEdge[node + 1]};
  }
  void countReads();
};

struct BlockContext {
  const Function* function = nullptr;
  const Liveness* live = nullptr;
  const std::vector<Place>* homes = nullptr;  // indexed like live->globals
  std::size_t block = 0;
  // The minimum and maximum number of requests per TMU that are in flight before the block, over
  // all paths.
  std::array<std::uint32_t, 2> fewestInFlight{};
  std::array<std::uint32_t, 2> mostInFlight{};
  bool fuse = false;       // operations may write their results directly to I/O addresses
  bool setNoSwap = false;  // set TMU_NOSWAP at the start of the block
};

bool isRequest(const Node& node);  // of a TMU

// Whether the node keeps some elements of its target's previous value.
inline bool isConditionalWrite(const Node& node) {
  return node.cond != isa::Cond::Always && node.address == isa::address::kNop;
}

Graph buildGraph(const BlockContext& context);

// Raises the priority of TMU requests and their predecessors, as if the results were needed at
// the end of the block.
void prioritiseRequests(Graph& graph);

}  // namespace qpu::compiler

#endif
