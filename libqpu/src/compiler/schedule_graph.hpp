// The dependence graph of the operations in a basic block, which is the input to the list
// scheduler. Reference: Philip B. Gibbons and Steven S. Muchnick, "Efficient Instruction Scheduling
// for a Pipelined Architecture", 1986.
#ifndef QPU_SRC_COMPILER_SCHEDULE_GRAPH_HPP
#define QPU_SRC_COMPILER_SCHEDULE_GRAPH_HPP

#include <array>
#include <cstdint>
#include <vector>

#include "compiler/allocate.hpp"

namespace qpu::compiler {

constexpr std::uint32_t kNone = UINT32_MAX;

// The number of requests that can safely be in flight in one TMU. Failures have been observed with
// more requests.
constexpr std::uint32_t kTmuDepth = 4;
// Latencies that the scheduler assumes, in instructions of 4 clocks. The latencies correspond to
// the default parameters of the emulator's model of a Pi 3 (docs/model.md). The comments name the
// parameters. Wrong latencies only make code slower. The test `levels` compares the latencies with
// the model.
constexpr int kTmuLatency = 20;          // tmu_memory_clocks
constexpr int kTmuRequest = 4;           // tmu_request_clocks
constexpr int kSlowTmuLatency = 26;      // kTmuLatency and kTmuRequest at the upper bounds of their ranges
constexpr int kSlowTmuRequest = 5;
constexpr int kDmaStoreSetup = 14;       // store_ns
constexpr int kDmaStoreRow = 5;          // store_burst_ns and store_word_ns for 16 words
constexpr int kDmaLoadSetup = 22;        // load_ns
constexpr int kDmaLoadRow = 7;           // load_burst_ns and load_word_ns for 16 words

// Latencies, in instructions, for the hazards that the manual describes.
constexpr int kVpmReadLatency = 4;
constexpr int kNoSwapLatency = 3;
constexpr int kSfuLatency = 3;

constexpr std::uint8_t kRotateByR5 = 16;

// Bit masks of the two pipes, of the register files, and of the units that an instruction can
// access only once.
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
  std::uint32_t number = 0;  // number of the value, small-immediate code, or address
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
  bool isLiveOutCopy = false;  // the node moves value `a` to its home register
  bool quadSource = false;  // the rotation stays within the first quad
  std::uint8_t rotate = 0;  // 1..15 or kRotateByR5
  std::uint8_t address = isa::address::kNop;  // the I/O address that is written instead of a register
  std::uint8_t files = kToNeither;            // the files in which the I/O address exists
  std::uint8_t exclusive = 0;
  std::uint8_t unit = 0;
  Place result = kNowhere;  // kR4 or kR5 if the hardware writes the result to this register
  Source a, b;
  std::uint32_t target = kNone;  // the value that is written
  std::uint32_t constant = 0;
  std::uint32_t site = code::Object::kNoSite;
  std::uint32_t predecessors = 0;  // number of edges that lead to this node
  std::int32_t height = 0;  // length in instructions of the critical path from this node to the end of the block

  bool canStall() const { return form == Form::Receive || form == Form::Wait; }
};

// The vector that a register holds between two writes of all its elements.
struct Value {
  Vreg vreg = 0;
  Place home = kNowhere;   // home register, if the value is live-in or live-out
  bool liveIn = false;     // the value is in its home register at the start
  bool liveOut = false;    // the value must be in its home register at the end
  std::uint32_t reads = 0;
  std::uint32_t updates = 0;    // conditional writes
  std::uint32_t rotations = 0;  // reads by rotations across all 16 elements
  std::uint32_t firstUse = 0, uses = 0;  // the value's part of Graph::users
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
  std::vector<std::uint32_t> users;      // the nodes that read each value, sorted by value
  std::vector<std::uint32_t> firstEdge;  // indexed by node: index of the node's first edge; one more entry for the end
  std::vector<Edge> edges;
  std::uint32_t lastFlags = kNone;       // the node that sets the flags for the branch
  bool branches = false;                 // true if the block ends with a conditional branch

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
  // Indexed by TMU: the minimum and maximum number of requests that are in flight at the start of
  // the block, over all paths.
  std::array<std::uint32_t, 2> fewestInFlight{};
  std::array<std::uint32_t, 2> mostInFlight{};
  bool fuse = false;       // allows operations to write results directly to I/O addresses
  bool setNoSwap = false;  // sets TMU_NOSWAP at the start of the block
};

bool isRequest(const Node& node);  // returns true if the node is a TMU request

// Returns true if the node keeps some elements of its target's previous vector.
inline bool isConditionalWrite(const Node& node) {
  return node.cond != isa::Cond::Always && node.address == isa::address::kNop;
}

Graph buildGraph(const BlockContext& context);

// Gives TMU requests and their predecessors the priority that they would have if the results were
// needed at the end of the block.
void prioritiseRequests(Graph& graph);

}  // namespace qpu::compiler

#endif
