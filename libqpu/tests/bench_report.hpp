// Prints the results of the kernel benchmarks: the clocks in the emulator's model, the share of
// the limit that the kernel reaches, and the range of this share when the model's parameters
// change within their ranges.
#ifndef TESTS_BENCH_REPORT_HPP
#define TESTS_BENCH_REPORT_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "emu/model.hpp"
#include "runtime/executable.hpp"
#include "tests/folder.hpp"

namespace bench {

using qpu::emu::Board;
using qpu::runtime::EmulatedWork;

inline bool json = false;
inline bool ranges = false;
inline bool first = true;

inline const Board& board() { return qpu::runtime::emulatedBoard(); }

// The result of a kernel with one model. The limit is the minimum number of clocks that the bus
// or the pipes need for the kernel's work.
struct Line {
  std::string name;
  EmulatedWork work;
  double clockHz = 0;
  double share = 0;
  const char* by = "";
  double timesNaive = 0;  // speedup relative to the naive kernel; 0 if there is no naive kernel
  double seconds() const { return static_cast<double>(work.clocks) / clockHz; }
};
using Lines = std::vector<Line>;
inline Lines lines;

// The range of a kernel's results with several models.
struct Range {
  double low = 1e9, high = 0;  // range of `share`
  double leastSeconds = 1e9, mostSeconds = 0;
  double moves = 0;  // the largest change of the share that a single assumption causes
  std::string mover;
  void take(const Line& l) {
    low = std::min(low, l.share);
    high = std::max(high, l.share);
    leastSeconds = std::min(leastSeconds, l.seconds());
    mostSeconds = std::max(mostSeconds, l.seconds());
  }
};

inline EmulatedWork measured(const std::function<void()>& f) {
  const EmulatedWork before = qpu::runtime::emulatedWork();
  f();
  EmulatedWork w = qpu::runtime::emulatedWork();
  w.runs -= before.runs;
  w.clocks -= before.clocks;
  w.qpuClocks -= before.qpuClocks;
  w.instructions -= before.instructions;
  w.stalledOnTmu -= before.stalledOnTmu;
  w.stalledOnVpm -= before.stalledOnVpm;
  w.stalledOnOther -= before.stalledOnOther;
  w.memoryReadBytes -= before.memoryReadBytes;
  w.memoryWriteBytes -= before.memoryWriteBytes;
  return w;
}

inline double busClocks(double bytes) { return bytes / board().memoryBytesPerClock(); }
inline double pipeClocks(double flops) { return flops / 96; }

// Returns the separator between two entries in the list that --json prints.
inline const char* separator() {
  const char* const text = first ? "\n  " : ",\n  ";
  first = false;
  return text;
}

inline void header() {
  if (json) {
    (void)std::printf("{\"board\": \"%s\", \"figures\": [", board().name);
    return;
  }
  (void)std::printf(
      "model of a %s: %.0f MHz, %.2f bytes per clock on the bus, %.1f GFLOPS; not measured on "
      "hardware\n%-34s %10s %9s %7s %7s",
      board().name, board().clockHz / 1e6, board().memoryBytesPerClock(), board().peakFlops() / 1e9,
      "kernel", "clocks", "ms", "share", "of");
  if (ranges)
    (void)std::printf("  %-15s  %-20s  %s\n", "share, range", "ms, range", "moved most by");
  else
    (void)std::printf(" %6s %6s %6s %6s %8s  %s\n", "issue", "TMU", "VPM", "other", "MB",
                      "vs naive");
}

inline void print(const Line& l, const Range* range) {
  const EmulatedWork& w = l.work;
  const auto clocks = static_cast<double>(w.clocks);
  const auto of = [&w](std::uint64_t part) {
    return 100 * static_cast<double>(part) / static_cast<double>(w.qpuClocks);
  };
  if (json) {
    (void)std::printf("%s{\"kernel\": \"%s\", \"clocks\": %.0f, \"seconds\": %.6g, "
                      "\"share\": %.4f, \"limit\": \"%s\"",
                      separator(), l.name.c_str(), clocks, l.seconds(), l.share, l.by);
    if (l.timesNaive != 0) (void)std::printf(", \"timesNaive\": %.3f", l.timesNaive);
    if (range != nullptr)
      (void)std::printf(", \"shareLow\": %.4f, \"shareHigh\": %.4f, \"secondsLow\": %.6g, "
                        "\"secondsHigh\": %.6g, \"movedBy\": \"%s\"",
                        range->low, range->high, range->leastSeconds, range->mostSeconds,
                        range->mover.c_str());
    (void)std::printf("}");
    return;
  }
  (void)std::printf("%-34s %10.0f %9.3f %6.1f%% %7s", l.name.c_str(), clocks, 1e3 * l.seconds(),
                    100 * l.share, l.by);
  if (range != nullptr) {
    (void)std::printf("  %5.1f to %5.1f%%  %8.3f to %8.3f  %s\n", 100 * range->low,
                      100 * range->high, 1e3 * range->leastSeconds, 1e3 * range->mostSeconds,
                      range->mover.c_str());
    return;
  }
  (void)std::printf(" %5.0f%% %5.0f%% %5.0f%% %5.0f%% %8.2f", 4 * of(w.instructions),
                    of(w.stalledOnTmu), of(w.stalledOnVpm), of(w.stalledOnOther),
                    1e-6 * static_cast<double>(w.memoryReadBytes + w.memoryWriteBytes));
  if (l.timesNaive != 0) (void)std::printf("  %10.2f", l.timesNaive);
  (void)std::printf("\n");
  (void)std::fflush(stdout);
}

// Adds a line and returns its clocks. Prints the line unless its range must still be determined.
// `limit` is the minimum number of clocks. `naive` is the number of clocks of the naive kernel,
// or 0.
inline double line(const std::string& name, const EmulatedWork& w, double limit, const char* by,
            double naive = 0) {
  const auto clocks = static_cast<double>(w.clocks);
  lines.push_back({name, w, board().clockHz, limit / clocks, by, naive / clocks});
  if (!ranges) print(lines.back(), nullptr);
  return clocks;
}

// Runs the kernels with the current model and returns the lines of their results.
inline Lines underModel(const std::function<void()>& kernels) {
  lines.clear();
  kernels();
  return lines;
}

// Returns the groups of model parameters that affect the number of clocks, without duplicates.
inline std::vector<std::string> assumptions() {
  std::vector<std::string> all;
  for (const qpu::emu::Parameter& p : qpu::emu::parameters()) {
    const std::string group = p.group;
    if (group != "clock" && group != "launch" &&
        std::find(all.begin(), all.end(), group) == all.end())
      all.push_back(group);
  }
  return all;
}

// Writes a model file in which the parameters of `group` are at one end of their ranges.
inline void writeModel(const std::string& path, const std::string& group, qpu::emu::Bound bound) {
  const Board& at = *qpu::emu::findBoard(board().name, bound);
  std::ofstream file(path);
  file.precision(17);
  file << "source = one assumption at an end of its range\nboard = " << at.name << "\n";
  for (const qpu::emu::Parameter& p : qpu::emu::parameters())
    if (p.group == group) file << p.name << " = " << at.*p.member << "\n";
}

// Runs the kernels with all models and prints each kernel with its range.
inline void printRanges(const std::function<void()>& kernels) {
  const Lines base = underModel(kernels);
  std::vector<Range> all(base.size());
  const auto take = [&](const char* model, const std::string& group) {
    (void)setenv("QPU_MODEL", model, 1);
    const Lines other = underModel(kernels);
    (void)unsetenv("QPU_MODEL");
    for (std::size_t n = 0; n < base.size(); ++n) {
      all[n].take(other.at(n));
      const double moves = std::fabs(other[n].share - base[n].share);
      if (group.empty() || moves <= all[n].moves) continue;
      all[n].moves = moves;
      all[n].mover = group;
    }
  };
  for (std::size_t n = 0; n < base.size(); ++n) all[n].take(base[n]);
  take("fast", "");
  take("slow", "");
  const test::Folder folder;
  int number = 0;
  for (const std::string& group : assumptions())
    for (const qpu::emu::Bound bound : {qpu::emu::Bound::Fast, qpu::emu::Bound::Slow}) {
      const std::string path = (folder.path / std::to_string(number++)).string();
      writeModel(path, group, bound);
      take(path.c_str(), group);
    }
  for (std::size_t n = 0; n < base.size(); ++n) print(base[n], &all[n]);
}

}  // namespace bench

#endif
